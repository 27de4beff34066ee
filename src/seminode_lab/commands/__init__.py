"""The commands `seminode run`, `sweep`, `reproduce` and `report`, which load the laboratory when they are used."""

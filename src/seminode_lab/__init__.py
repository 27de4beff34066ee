"""The laboratory: the experiments of Kidger, Chen and Lyons (ICML 2021) and the data sets that they need."""

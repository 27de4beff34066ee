"""What adjoints that solve the adjoint equation share."""

"""The laboratory: data and, on top of it, the experiments of Kidger, Chen and Lyons (ICML 2021)."""

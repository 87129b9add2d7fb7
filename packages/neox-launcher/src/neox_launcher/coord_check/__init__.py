"""`neox-launch coord-check`: train copies of several widths, and compare how their activations change."""

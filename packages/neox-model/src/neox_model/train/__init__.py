"""Training: the assembly of everything, the loop, its step and its callbacks."""

"""gMLP layers, which mix tokens by a learned matrix."""

"""The engine of a training: its contract, and its implementations."""

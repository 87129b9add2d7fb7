"""The engine of a run: its contract, and its implementations."""

"""The engine of a training: its contract, and DeepSpeed behind it."""

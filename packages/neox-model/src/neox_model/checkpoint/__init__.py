"""Save and load checkpoints: logical tensors that any layout can read, written atomically."""

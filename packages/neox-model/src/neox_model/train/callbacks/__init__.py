"""Actions of the training loop besides training."""

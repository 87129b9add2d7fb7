"""Actions of the training loop besides training, one hook per file."""

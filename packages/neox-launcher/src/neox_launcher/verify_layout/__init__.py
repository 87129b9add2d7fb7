"""`neox-launch verify-layout`: train a small copy of a model on a layout and in one process, and compare."""

"""The interface for programs and notebooks (docs/python.md); neox_model has its names."""

"""Text from a trained model: `python -m neox_model.generate`."""

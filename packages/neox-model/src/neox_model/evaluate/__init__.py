"""Evaluation of a checkpoint: `python -m neox_model.evaluate`."""

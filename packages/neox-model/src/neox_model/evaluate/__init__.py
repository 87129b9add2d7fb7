"""Loss and perplexity of a checkpoint: `python -m neox_model.evaluate`."""

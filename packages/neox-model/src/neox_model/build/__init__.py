"""From configuration to a model: the layers as one list, then as a plain module or as a pipeline."""

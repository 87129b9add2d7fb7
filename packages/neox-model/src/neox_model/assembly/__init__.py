"""Build a model from configuration: a list of layers, then a plain module or a pipeline."""

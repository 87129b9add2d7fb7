"""Values derived from a configuration: batch sizes, layers, DeepSpeed's settings, changes when resuming."""

"""What was decided for a run, as plain frozen values: the model, how it runs, its data and its updates."""

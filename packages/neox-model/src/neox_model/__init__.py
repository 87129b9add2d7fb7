"""The parallel transformer: its layers, how it is trained, evaluated, saved and sampled from."""

"""From texts to a configuration: what `neox-launch init` does besides asking."""

"""The commands `neox-launch` and `neox-config`."""

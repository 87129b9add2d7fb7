"""The worker of `neox-launch coord-check`."""

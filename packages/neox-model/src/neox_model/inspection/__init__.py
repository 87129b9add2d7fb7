"""The command `neox-checkpoint`: what a checkpoint contains, whether it is sound, and how two differ."""

"""Comparison of trainings for `neox-launch verify-resume`: their steps, then their checkpoints."""

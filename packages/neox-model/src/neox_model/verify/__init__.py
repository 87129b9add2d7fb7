"""Comparison of runs for `neox-launch verify-resume`: their steps, then their checkpoints."""

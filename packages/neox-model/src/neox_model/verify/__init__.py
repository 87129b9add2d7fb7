"""The comparison of trainings for `neox-launch verify-resume`: their steps, then what they left behind."""

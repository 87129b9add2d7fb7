"""Comparison of one run on several processes with the same in one, for `neox-launch verify-layout`."""

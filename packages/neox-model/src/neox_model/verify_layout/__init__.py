"""Comparison of one training on several processes with the same in one, for `neox-launch verify-layout`."""

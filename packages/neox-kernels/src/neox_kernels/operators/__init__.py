"""The fused operators, one subject per module; all require torch."""

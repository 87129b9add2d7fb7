"""Compile layers and kernels for GPUs without one, and compare figures of the result: `make gpu-gate`."""

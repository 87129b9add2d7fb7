"""Compression in training: matrices with quantized and pruned weights."""

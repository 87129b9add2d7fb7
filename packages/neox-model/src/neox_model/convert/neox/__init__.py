"""Checkpoints of GPT-NeoX: their files, their tensors over tensor-parallel ranks, and their configuration."""

"""Transformer layers with plain arguments and explicit process groups; hidden states are sequence-first."""

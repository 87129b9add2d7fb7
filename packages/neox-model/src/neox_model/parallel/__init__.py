"""Splitting a model over ranks: who talks to whom, and the layers whose weights are split."""

"""Optimizers whose replicas exchange one bit per element."""

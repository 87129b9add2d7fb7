"""Metric writers; `neox_model.train.writers` opens the configured ones."""

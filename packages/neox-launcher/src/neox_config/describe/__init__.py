"""Output for readers: reference documentation, JSON schema, and tables."""

"""Parameters by subject."""

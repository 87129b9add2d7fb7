"""Retrieval models: their towers, and the search of blocks."""

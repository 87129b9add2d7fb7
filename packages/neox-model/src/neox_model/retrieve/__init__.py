"""Search with retrieval models: an index of the blocks of the texts, and the best blocks for a query."""

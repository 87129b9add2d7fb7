"""Split a model over ranks: process groups, collectives, and layers with split weights."""

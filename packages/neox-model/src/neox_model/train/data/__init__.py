"""The data of a run: datasets, curricula, streams of batches, and the position in them."""

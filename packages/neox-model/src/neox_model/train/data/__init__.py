"""The data of a training: datasets, curricula, streams of batches, and the position in them."""

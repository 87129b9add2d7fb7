"""Measures of the difficulty of samples, for a curriculum."""

from collections.abc import Callable, Iterator

import numpy as np

from neox_data.blend import SampleDataset
from neox_data.trace import passages

__all__ = ["METRICS", "num_documents", "vocabulary_rarity"]

# Rarities are stored as whole numbers, in thousandths.
_SCALE = 1000


def vocabulary_rarity(dataset: SampleDataset, num_samples: int) -> np.ndarray:
    """Return minus the mean logarithm (base 2) of the frequencies of a sample's tokens; int64, thousandths.

    Frequencies are counted over the tokens of all samples; padding is left out.

    Source: arXiv:2212.03597 (vocabulary rarity), as a mean so that it does not depend on the length.
    """
    counts = np.zeros(1, np.int64)
    for tokens in _inputs(dataset, num_samples):
        found = np.bincount(tokens)
        if len(found) > len(counts):
            counts = np.pad(counts, (0, len(found) - len(counts)))
        counts[: len(found)] += found
    with np.errstate(divide="ignore"):
        rarity = -np.log2(counts / counts.sum())
    means = (rarity[tokens].mean() for tokens in _inputs(dataset, num_samples))
    return np.fromiter((round(mean * _SCALE) for mean in means), np.int64, num_samples)


def num_documents(dataset: SampleDataset, num_samples: int) -> np.ndarray:
    """Return the number of documents in each sample, int64; fewer documents are longer passages."""
    counts = (sum(1 for _ in passages(dataset, item)) for item in range(num_samples))
    return np.fromiter(counts, np.int64, num_samples)


def _inputs(dataset: SampleDataset, num_samples: int) -> Iterator[np.ndarray]:
    for item in range(num_samples):
        # The first row of an item with labels contains its tokens; what no document fills is padding.
        tokens = np.atleast_2d(dataset[item])[0, :-1]
        yield tokens[: sum(passage.length for passage in passages(dataset, item))]


# From a dataset and the number of its first items to measure, their difficulties.
METRICS: dict[str, Callable[[SampleDataset, int], np.ndarray]] = {
    "vocabularyrarity": vocabulary_rarity,
    "documents": num_documents,
}

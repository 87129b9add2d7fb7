"""Digest samples, to detect a resumed training that reads them in a different order."""

import hashlib

import numpy as np

from neox_data.blend import BlendedDataset, SampleDataset
from neox_data.curriculum.dataset import CurriculumDataset

__all__ = ["digest_of_samples"]

_COMPARED = 32


def digest_of_samples(dataset: SampleDataset, count: int) -> str:
    """Digest the tokens of evenly spaced samples among the first `count`.

    A blend whose order differs from that of earlier versions has another digest than theirs: it can differ in
    a few samples, which evenly spaced ones would miss.
    """
    last = max(0, min(count, len(dataset)) - 1)
    digest = hashlib.sha256()
    for item in sorted({last * step // _COMPARED for step in range(_COMPARED + 1)}):
        digest.update(np.ascontiguousarray(dataset[item], dtype="<i8").tobytes())
    blend = dataset.datasets[0] if isinstance(dataset, CurriculumDataset) else dataset
    if count and isinstance(blend, BlendedDataset) and blend.differs_from_earlier_versions:
        digest.update(blend.weights.tobytes())
    return digest.hexdigest()[:16]

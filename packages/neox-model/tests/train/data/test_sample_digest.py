import hashlib

import numpy as np

from neox_data.blend import BlendedDataset
from neox_model.train.data.documents import digest_of_samples, documents_in


class Numbers:
    """Item k of dataset `first` is [first + k]."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, item: int) -> np.ndarray:
        return np.array([self.first + item])


def blend(weights: list[float]) -> BlendedDataset:
    return BlendedDataset([Numbers(number * 10_000) for number in range(len(weights))], weights, 10_000)


def test_digest_is_of_33_evenly_spaced_samples() -> None:
    dataset = blend([0.5, 0.25, 0.25])
    items = sorted({4_999 * step // 32 for step in range(33)})
    rows = b"".join(np.asarray(dataset[item], "<i8").tobytes() for item in items)
    assert digest_of_samples(dataset, 5_000) == hashlib.sha256(rows).hexdigest()[:16]


def test_the_documents_of_a_blend_are_known_if_those_of_all_its_datasets_are() -> None:
    dataset = blend([0.5, 0.25, 0.25])
    assert documents_in(dataset) is documents_in(dataset.datasets[0]) is None
    for number, source in enumerate(dataset.datasets):
        assert documents_in(dataset) is None
        source.num_documents = 10**number
    assert documents_in(dataset) == 111
    assert documents_in(dataset.datasets[1]) == 10

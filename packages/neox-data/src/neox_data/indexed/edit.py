"""Datasets out of datasets: several as one, one as several, an older layout as today's.

Tokens are copied once and never looked at.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from neox_data.errors import IndexedDatasetError
from neox_data.indexed.base import IndexedDataset
from neox_data.indexed.index import read_index
from neox_data.indexed.layout import LIST_INDEX, idx_path
from neox_data.indexed.mmap_reader import MMapIndexedDataset
from neox_data.indexed.writer import IndexedDatasetWriter
from neox_data.splits import split_documents

__all__ = ["convert_indexed", "merge_indexed", "split_indexed"]

_CHUNK = 1 << 20


def merge_indexed(prefixes: Sequence[Path | str], output: Path | str) -> IndexedDataset:
    """Write the documents of several datasets, one after another, as one; and return it opened.

    Raises:
        IndexedDatasetError: a dataset cannot be read, or they do not go together.
    """
    datasets = [_open(prefix, output) for prefix in prefixes]
    dtypes = {dataset.dtype for dataset in datasets}
    if len(dtypes) != 1:
        found = ", ".join(f"{dataset.prefix}: {dataset.dtype}" for dataset in datasets)
        raise IndexedDatasetError(
            f"datasets of different token types are not merged ({found}); make them with one tokenizer"
        )
    with IndexedDatasetWriter(output, dtype=dtypes.pop()) as writer:
        for dataset in datasets:
            writer.append_dataset(dataset)
    return MMapIndexedDataset(output, read_index(output))


def split_indexed(
    prefix: Path | str, split: str, output: Path | str
) -> Iterator[tuple[range, IndexedDataset]]:
    """Write the parts of a split as datasets `OUTPUT_train`, `OUTPUT_valid`, `OUTPUT_test`; no empty ones.

    Yields:
        The documents of each part, and the part opened, once it is written.

    Raises:
        IndexedDatasetError: the dataset cannot be read.
        DataError: the split has no shares.
    """
    for part, documents in split_documents(split, len(read_index(prefix).sizes)).items():
        if documents:
            target = Path(f"{output}_{part}")
            dataset = _open(prefix, target)
            with IndexedDatasetWriter(target, dtype=dataset.dtype) as writer:
                writer.append_dataset(dataset, documents)
            yield documents, MMapIndexedDataset(target, read_index(target))


def convert_indexed(prefix: Path | str, output: Path | str) -> IndexedDataset:
    """Write a dataset of the `cached` or `lazy` layout in the layout of today; and return it opened.

    Raises:
        IndexedDatasetError: the dataset cannot be read, or has the layout of today already.
    """
    if read_index(prefix).layout != LIST_INDEX.name:
        raise IndexedDatasetError(f"{idx_path(prefix)} has the mmap layout already; use it as it is")
    return merge_indexed([prefix], output)


def _open(prefix: Path | str, output: Path | str) -> IndexedDataset:
    """A dataset that can be copied to `output`: each document one sequence, and another place."""
    if idx_path(prefix).resolve() == idx_path(output).resolve():
        raise IndexedDatasetError(f"{prefix} is both read and written; choose another output")
    dataset = MMapIndexedDataset(prefix, read_index(prefix))
    starts = dataset.document_starts
    # 0 alone is what GPT-NeoX's merging tool leaves.
    if len(starts) > 1 and not _counts_up(starts, len(dataset)):
        raise IndexedDatasetError(
            f"{idx_path(prefix)} has documents of several sequences, which would be lost; make the data "
            "again with preprocess_data"
        )
    return dataset


def _counts_up(starts: np.ndarray, num_sequences: int) -> bool:
    return len(starts) == num_sequences + 1 and all(
        np.array_equal(starts[first : first + _CHUNK], np.arange(first, min(first + _CHUNK, len(starts))))
        for first in range(0, len(starts), _CHUNK)
    )

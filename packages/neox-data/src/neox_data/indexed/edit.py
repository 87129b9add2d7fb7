"""Merge, split and convert datasets.

Tokens are copied once, without being parsed. If their hash is known, they are compared with it on the way.
"""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neox_data.errors import IndexedDatasetError
from neox_data.indexed.base import IndexedDataset
from neox_data.indexed.copy import Digest
from neox_data.indexed.index import read_index
from neox_data.indexed.layout import LIST_INDEX, bin_path, idx_path
from neox_data.indexed.mmap_reader import MMapIndexedDataset
from neox_data.indexed.writer import IndexedDatasetWriter
from neox_data.splits import split_documents

__all__ = ["Copied", "convert_indexed", "merge_indexed", "split_indexed"]

_CHUNK = 1 << 20


class Copied(NamedTuple):
    """A dataset of copied documents.

    Attributes:
        dataset: the new dataset.
        documents: the documents, as numbers of the dataset that was split; of a merged one, all.
        bin_sha256: hash of the `.bin`; None if a hash of the source was not known.
    """

    dataset: IndexedDataset
    documents: range
    bin_sha256: str | None


def merge_indexed(
    prefixes: Sequence[Path | str], output: Path | str, *, hashes: Sequence[str | None] = ()
) -> Copied:
    """Concatenate the documents of several datasets.

    Args:
        prefixes: the datasets.
        output: prefix of the new dataset.
        hashes: SHA-256 of the `.bin` of each dataset, or None if it is unknown; empty: all are unknown.

    Raises:
        IndexedDatasetError: a dataset cannot be read or does not match its hash, or the token types differ;
            nothing is written.
    """
    datasets = [_open(prefix, output) for prefix in prefixes]
    dtypes = {dataset.dtype for dataset in datasets}
    if len(dtypes) != 1:
        found = ", ".join(f"{dataset.prefix}: {dataset.dtype}" for dataset in datasets)
        raise IndexedDatasetError(
            f"datasets of different token types cannot be merged ({found}); create them with one tokenizer"
        )
    with IndexedDatasetWriter(output, dtype=dtypes.pop()) as writer:
        for dataset, expected in zip(datasets, hashes or [None] * len(datasets), strict=True):
            digest = None if expected is None else hashlib.sha256()
            writer.append_dataset(dataset, digest=digest)
            _compare(dataset, digest, expected)
    merged = MMapIndexedDataset(output, read_index(output))
    return Copied(merged, range(len(merged)), writer.bin_sha256)


def split_indexed(
    prefix: Path | str, split: str, output: Path | str, *, sha256: str | None = None
) -> list[Copied]:
    """Write the non-empty parts of a split as `OUTPUT_train`, `OUTPUT_valid` and `OUTPUT_test`.

    Args:
        prefix: the dataset.
        split: relative sizes of the parts.
        output: prefix of the prefixes of the parts.
        sha256: hash of the `.bin` of the dataset; None: unknown.

    Raises:
        IndexedDatasetError: the dataset cannot be read or does not match its hash; nothing is written.
        DataError: the split has no shares.
    """
    parts = split_documents(split, len(read_index(prefix).sizes))
    writers = []
    digest = None if sha256 is None else hashlib.sha256()
    with ExitStack() as files:
        # In file order, so that the digest is given the whole file; all are renamed at the end.
        for part, documents in parts.items():
            if documents:
                dataset = _open(prefix, f"{output}_{part}")
                writer = IndexedDatasetWriter(f"{output}_{part}", dtype=dataset.dtype)
                files.enter_context(writer).append_dataset(dataset, documents, digest=digest)
                writers.append((writer, documents))
        if writers:
            _compare(dataset, digest, sha256)
    return [
        Copied(MMapIndexedDataset(writer.prefix, read_index(writer.prefix)), documents, writer.bin_sha256)
        for writer, documents in writers
    ]


def _compare(dataset: IndexedDataset, digest: Digest | None, expected: str | None) -> None:
    if digest is not None and digest.hexdigest() != expected:
        raise IndexedDatasetError(
            f"{bin_path(dataset.prefix)} does not match the hash in its manifest, so its tokens are damaged "
            "or of another dataset; copy the dataset again or create it again with preprocess_data",
            code="other-hash",
        )


def convert_indexed(prefix: Path | str, output: Path | str) -> IndexedDataset:
    """Convert a dataset from the `cached` or `lazy` layout to the mmap layout, and return it.

    Raises:
        IndexedDatasetError: the dataset cannot be read, or already has the mmap layout.
    """
    if read_index(prefix).layout != LIST_INDEX.name:
        raise IndexedDatasetError(
            f"{idx_path(prefix)} already has the mmap layout; use it without conversion", code="already-mmap"
        )
    return merge_indexed([prefix], output).dataset


def _open(prefix: Path | str, output: Path | str) -> IndexedDataset:
    """Open a dataset to copy to `output`; check that each document is one sequence and the paths differ."""
    if idx_path(prefix).resolve() == idx_path(output).resolve():
        raise IndexedDatasetError(f"{prefix} is both input and output; choose another output")
    dataset = MMapIndexedDataset(prefix, read_index(prefix))
    starts = dataset.document_starts
    is_counted = len(starts) == len(dataset) + 1 and all(
        np.array_equal(starts[first : first + _CHUNK], np.arange(first, min(first + _CHUNK, len(starts))))
        for first in range(0, len(starts), _CHUNK)
    )
    # GPT-NeoX's merge tool writes only [0].
    if len(starts) > 1 and not is_counted:
        raise IndexedDatasetError(
            f"{idx_path(prefix)} has documents with several sequences, which would be lost; create the "
            "data again with preprocess_data",
            code="several-sequences",
        )
    return dataset

"""Where each document of a dataset comes from: `PREFIX.offsets` beside it, read with its manifest.

The file holds an int64 per document, in their order: the byte of the (unpacked) source where the document
begins, or its row in a `.parquet`. Which source that is follows from the number of documents that the
manifest gives for each of them.
"""

import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from neox_data.indexed.copy import copy_bytes
from neox_data.indexed.layout import offsets_path
from neox_data.manifest import read_manifest
from neox_data.whole_files import written_aside

__all__ = ["DocumentSources", "OffsetsWriter", "Source", "cut_offsets", "merge_offsets"]

_ENTRY = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a document was read from.

    Attributes:
        path: the file, as it was named when it was read.
        offset: byte of its (unpacked) content where the document begins; the members of an archive count one
            after another. Of a `.parquet`, the row.
    """

    path: str
    offset: int

    def __str__(self) -> str:
        return f"{self.path}, {'row' if self.path.endswith('.parquet') else 'byte'} {self.offset:,}"


class DocumentSources:
    """The sources of a dataset's documents, as far as they were recorded.

    Args:
        prefix: of the dataset.

    Raises:
        IndexedDatasetError: its manifest is damaged.
    """

    def __init__(self, prefix: Path | str) -> None:
        inputs = (read_manifest(prefix) or {}).get("inputs", [])
        self._paths = [source["path"] for source in inputs]
        self._ends = list(accumulate(source.get("documents", 0) for source in inputs))
        self._offsets = np.empty(0, _ENTRY)
        path = offsets_path(prefix)
        if self._ends and self._ends[-1] and path.exists():
            if path.stat().st_size == self._ends[-1] * _ENTRY.itemsize:
                self._offsets = np.memmap(path, _ENTRY, mode="r")

    def source_of(self, document: int) -> Source | None:
        """Where a document was read from; None where nobody recorded it."""
        if document >= len(self._offsets):
            return None
        return Source(self._paths[bisect_right(self._ends, document)], self._offsets.item(document))


class OffsetsWriter:
    """Collects the offsets of the documents of one dataset; see `open`.

    Args:
        file: is written to.
        num_files: sources.

    Attributes:
        documents: documents of each source so far.
    """

    def __init__(self, file: BinaryIO, num_files: int) -> None:
        self._file = file
        self.documents = np.zeros(num_files, np.int64)

    @classmethod
    @contextmanager
    def open(cls, prefix: Path | str, num_files: int) -> "Iterator[OffsetsWriter]":
        """A writer whose file appears when the block ends well."""
        with written_aside(offsets_path(prefix)) as file:
            yield cls(file, num_files)

    def append(self, files: np.ndarray, offsets: np.ndarray) -> None:
        """Add documents: the number of each one's source, and where it begins there."""
        self._file.write(offsets.astype(_ENTRY).data)
        self.documents += np.bincount(files, minlength=len(self.documents))

    def with_documents(self, inputs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """What a manifest says of the sources, with the number of documents that each one gave."""
        return [
            {**source, "documents": count}
            for source, count in zip(inputs, self.documents.tolist(), strict=True)
        ]


def cut_offsets(prefix: Path | str, documents: range, output: Path | str) -> None:
    """The offsets of consecutive documents of a dataset, for one of these; nothing where it has none."""
    path = offsets_path(prefix)
    if not path.exists():
        return
    with path.open("rb") as source, written_aside(offsets_path(output)) as file:
        count = len(documents) * _ENTRY.itemsize
        copy_bytes(source, file, first=documents.start * _ENTRY.itemsize, count=count)


def merge_offsets(prefixes: Sequence[Path | str], output: Path | str) -> None:
    """Put the offsets of datasets one after another, as their documents are; nothing where one has none."""
    paths = [offsets_path(prefix) for prefix in prefixes]
    if not all(path.exists() for path in paths):
        return
    with written_aside(offsets_path(output)) as file:
        for path in paths:
            with path.open("rb") as part:
                shutil.copyfileobj(part, file)

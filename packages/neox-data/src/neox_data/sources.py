"""Origin of each document of a dataset: `PREFIX.offsets`, together with the manifest.

The file contains an int64 per document, in order: the byte in the (uncompressed) source where the document
begins, or its row in a `.parquet`. The manifest's number of documents per source determines the source.
"""

import shutil
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from neox_data.indexed.copy import copy_bytes
from neox_data.indexed.layout import offsets_path
from neox_data.manifest import read_manifest
from neox_data.whole_files import written_aside

__all__ = ["OFFSET", "DocumentSources", "Source", "cut_offsets", "merge_offsets"]

OFFSET = np.dtype("<i8")
"""Type of an entry."""


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a document.

    Attributes:
        path: the file, as given when it was read.
        offset: byte of its (uncompressed) content where the document begins, counting through the members of
            an archive; for a `.parquet`, the row.
    """

    path: str
    offset: int

    def __str__(self) -> str:
        return f"{self.path}, {'row' if self.path.lower().endswith('.parquet') else 'byte'} {self.offset:,}"


class DocumentSources:
    """The recorded sources of a dataset's documents.

    Raises:
        IndexedDatasetError: its manifest is damaged.
    """

    def __init__(self, prefix: Path | str) -> None:
        inputs = (read_manifest(prefix) or {}).get("inputs", [])
        self._paths = [source["path"] for source in inputs]
        self._ends = list(accumulate(source.get("documents", 0) for source in inputs))
        self._offsets = np.empty(0, OFFSET)
        path = offsets_path(prefix)
        documents = self._ends[-1] if self._ends else 0
        if documents and path.exists() and path.stat().st_size == documents * OFFSET.itemsize:
            self._offsets = np.memmap(path, OFFSET, mode="r")

    def source_of(self, document: int) -> Source | None:
        """Return the source of a document; None if it was not recorded."""
        if document >= len(self._offsets):
            return None
        return Source(self._paths[bisect_right(self._ends, document)], self._offsets.item(document))


def cut_offsets(prefix: Path | str, documents: range, output: Path | str) -> None:
    """Write the offsets of a range of documents for a new dataset; do nothing if there are none."""
    path = offsets_path(prefix)
    if not path.exists():
        return
    with path.open("rb") as source, written_aside(offsets_path(output)) as file:
        count = len(documents) * OFFSET.itemsize
        copy_bytes(source, file, first=documents.start * OFFSET.itemsize, count=count)


def merge_offsets(prefixes: Sequence[Path | str], output: Path | str) -> None:
    """Concatenate the offsets of datasets; do nothing if one has none."""
    paths = [offsets_path(prefix) for prefix in prefixes]
    if not all(path.exists() for path in paths):
        return
    with written_aside(offsets_path(output)) as file:
        for path in paths:
            with path.open("rb") as part:
                shutil.copyfileobj(part, file)

"""Output of a preprocessing run for one key: the dataset, its offsets and its manifest."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from neox_data.indexed.writer import IndexedDatasetWriter
from neox_data.manifest import write_manifest
from neox_data.preprocess.encode import Column
from neox_data.sources import OffsetsWriter

__all__ = ["DatasetOutput", "files_without_text"]


class DatasetOutput:
    """Write the columns of one key; see `open`.

    Args:
        key: key of the texts.
        writer: writer of the tokens.
        places: writer of the documents' positions in their sources.

    Attributes:
        masked: number of labels below 0 so far.
        wholly_masked: number of documents that have only such labels so far.
    """

    def __init__(self, key: str, writer: IndexedDatasetWriter, places: OffsetsWriter) -> None:
        self.key = key
        self._writer = writer
        self._places = places
        self._characters = 0
        self.masked = self.wholly_masked = 0

    @classmethod
    @contextmanager
    def open(
        cls, prefix: Path, key: str, *, dtype: np.dtype[np.generic], num_files: int
    ) -> "Iterator[DatasetOutput]":
        """Open an output whose files are renamed into place at the end of the block, if there is no error."""
        prefix.parent.mkdir(parents=True, exist_ok=True)
        # The offsets are renamed after the dataset, which removes the offsets of the previous one.
        with (
            OffsetsWriter.open(prefix, num_files) as places,
            IndexedDatasetWriter(prefix, dtype=dtype) as writer,
        ):
            yield cls(key, writer, places)

    @property
    def num_documents(self) -> int:
        """Number of documents so far."""
        return self._writer.num_documents

    @property
    def characters(self) -> int:
        """Number of characters so far."""
        return self._characters

    def add(self, column: Column, characters: int) -> None:
        """Write the documents of a batch, and add its number of characters."""
        self._writer.append_all(column.tokens, column.sizes)
        self._places.append(column.files, column.offsets)
        self._characters += characters
        if column.tokens.dtype.kind == "i" and column.sizes.size:
            is_masked = column.tokens < 0
            self.masked += int(is_masked.sum())
            starts = np.cumsum(column.sizes) - column.sizes
            # Nothing in a document predicts its first token.
            is_masked[starts] = True
            self.wholly_masked += int(
                (np.add.reduceat(is_masked, starts, dtype=np.int64) == column.sizes).sum()
            )

    def describe(
        self,
        sources: Sequence[dict[str, Any]],
        *,
        tokenizer: dict[str, Any],
        options: dict[str, Any],
        counts: dict[str, int],
    ) -> list[str]:
        """Write the manifest after the dataset is complete; return the files without a document.

        See `write_manifest`.

        Args:
            sources: the files, without their numbers of documents.
            tokenizer: description of the tokenizer.
            options: other options that affect the tokens.
            counts: counts of the whole corpus; those of this dataset are written before them.
        """
        own = {
            "documents": self.num_documents,
            "tokens": self._writer.num_tokens,
            "characters": self._characters,
        }
        inputs = self._places.with_documents(sources)
        write_manifest(
            self._writer.prefix,
            inputs=inputs,
            tokenizer=tokenizer,
            options=options,
            counts={**own, **counts},
            bin_sha256=self._writer.bin_sha256,
            largest_token=self._writer.largest_token,
        )
        return files_without_text(inputs)


def files_without_text(inputs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of a manifest's sources that have no documents."""
    return [source["path"] for source in inputs if not source["documents"]]

"""One dataset of a preprocessing run: the texts of one key as tokens, and what is told of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from neox_data.indexed.writer import IndexedDatasetWriter
from neox_data.manifest import write_manifest
from neox_data.preprocess.encode import Column
from neox_data.sources import OffsetsWriter

__all__ = ["DatasetOutput"]


class DatasetOutput:
    """Collects the columns of one key; see `open`.

    Args:
        key: whose texts they are.
        writer: of the tokens.
        places: of where the documents begin in their sources.
    """

    def __init__(self, key: str, writer: IndexedDatasetWriter, places: OffsetsWriter) -> None:
        self.key = key
        self._writer = writer
        self._places = places
        self._characters = 0

    @classmethod
    @contextmanager
    def open(
        cls, prefix: Path, key: str, *, dtype: np.dtype[np.generic], num_files: int
    ) -> "Iterator[DatasetOutput]":
        """An output whose files appear when the block ends well; missing folders are made."""
        prefix.parent.mkdir(parents=True, exist_ok=True)
        # The offsets appear after the dataset that they belong to: it removes those of the one before it.
        with (
            OffsetsWriter.open(prefix, num_files) as places,
            IndexedDatasetWriter(prefix, dtype=dtype) as writer,
        ):
            yield cls(key, writer, places)

    @property
    def num_documents(self) -> int:
        """Documents so far."""
        return self._writer.num_documents

    @property
    def characters(self) -> int:
        """Characters of the texts so far."""
        return self._characters

    def add(self, column: Column, characters: int) -> None:
        """Write the documents of a batch, which have so many characters."""
        self._writer.append_all(column.tokens, column.sizes)
        self._places.append(column.files, column.offsets)
        self._characters += characters

    def describe(
        self,
        sources: Sequence[dict[str, Any]],
        *,
        tokenizer: dict[str, Any],
        options: dict[str, Any],
        counts: dict[str, int],
    ) -> None:
        """Write the manifest, once the dataset is there; see `write_manifest`.

        Args:
            sources: the files, without the number of documents that each one gave.
            tokenizer: what made the tokens.
            options: what else decided them.
            counts: of the whole corpus; those of this dataset come before them.
        """
        own = {
            "documents": self.num_documents,
            "tokens": self._writer.num_tokens,
            "characters": self._characters,
        }
        write_manifest(
            self._writer.prefix,
            inputs=self._places.with_documents(sources),
            tokenizer=tokenizer,
            options=options,
            counts={**own, **counts},
            bin_sha256=self._writer.bin_sha256,
        )

"""Output of a preprocessing run for one key: the dataset, its offsets and its manifest."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from neox_data.indexed.layout import offsets_path
from neox_data.indexed.writer import IndexedDatasetWriter
from neox_data.manifest import write_manifest
from neox_data.preprocess.encode import Column
from neox_data.sources import OFFSET
from neox_data.whole_files import written_aside

__all__ = ["DatasetOutput", "files_without_text"]


class DatasetOutput:
    """Write the columns of one key; see `open`.

    Args:
        writer: writer of the tokens.
        offsets: file of the documents' positions in their sources.
        num_files: number of sources.

    Attributes:
        writer: writer of the tokens.
        characters: number of characters so far.
        masked: number of labels below 0 so far.
        wholly_masked: number of documents that have only such labels so far.
    """

    def __init__(self, writer: IndexedDatasetWriter, offsets: BinaryIO, num_files: int) -> None:
        self.writer = writer
        self._offsets = offsets
        self._documents = np.zeros(num_files, np.int64)
        self.characters = self.masked = self.wholly_masked = 0

    @classmethod
    @contextmanager
    def open(cls, prefix: Path, *, dtype: np.dtype[np.generic], num_files: int) -> "Iterator[DatasetOutput]":
        """Open an output whose files are renamed into place at the end of the block, if there is no error."""
        prefix.parent.mkdir(parents=True, exist_ok=True)
        # The offsets are renamed after the dataset, which removes the offsets of the previous one.
        with (
            written_aside(offsets_path(prefix)) as offsets,
            IndexedDatasetWriter(prefix, dtype=dtype) as writer,
        ):
            yield cls(writer, offsets, num_files)

    def add(self, column: Column, characters: int) -> None:
        """Write the documents of a batch, and add its number of characters."""
        self.writer.append_all(column.tokens, column.sizes)
        self._offsets.write(column.offsets.astype(OFFSET).data)
        self._documents += np.bincount(column.files, minlength=len(self._documents))
        self.characters += characters
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
        counts: Mapping[str, int],
    ) -> tuple[dict[str, int], list[str]]:
        """Write the manifest after the dataset is complete; see `write_manifest`.

        Args:
            sources: the files, without their numbers of documents.
            tokenizer: description of the tokenizer.
            options: other options that affect the tokens.
            counts: counts of the whole corpus; those of this dataset are written before them.

        Returns:
            All counts, and the files without a document.
        """
        writer = self.writer
        own = {"documents": writer.num_documents, "tokens": writer.num_tokens, "characters": self.characters}
        inputs = [
            {**source, "documents": count}
            for source, count in zip(sources, self._documents.tolist(), strict=True)
        ]
        write_manifest(
            writer.prefix,
            inputs=inputs,
            tokenizer=tokenizer,
            options=options,
            counts={**own, **counts},
            bin_sha256=writer.bin_sha256,
            largest_token=writer.largest_token,
        )
        return {**own, **counts}, files_without_text(inputs)


def files_without_text(inputs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of a manifest's sources that have no documents."""
    return [source["path"] for source in inputs if not source["documents"]]

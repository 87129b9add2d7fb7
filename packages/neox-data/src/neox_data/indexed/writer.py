"""Writes an indexed dataset in the mmap layout; both files appear together, complete, or not at all.

Memory does not grow with the corpus: lengths go to an anonymous spool file beside the output, and the index
is made from it at the end.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from neox_data.errors import IndexedDatasetError
from neox_data.indexed.base import IndexedDataset
from neox_data.indexed.copy import copy_bytes
from neox_data.indexed.layout import (
    MMAP_INDEX,
    VERSION,
    bin_path,
    dtype_code,
    idx_path,
    manifest_path,
    offsets_path,
)
from neox_data.whole_files import written_aside

__all__ = ["IndexedDatasetWriter"]

_CHUNK = 1 << 20
_STORED_BYTES = 1 << 25
_INT32_MAX = np.iinfo(np.int32).max


class IndexedDatasetWriter:
    """Collects documents, one sequence each, into `PREFIX.bin` and `PREFIX.idx`.

    Use it in a `with` block: leaving the block well makes the files appear (over older ones of the same
    name), an exception leaves what was there before.

    Args:
        prefix: path of the two files without `.bin` and `.idx`; missing folders are made.
        dtype: dtype of the tokens; see `layout.token_dtype`.

    Attributes:
        num_documents: documents so far.
        num_tokens: tokens so far.
    """

    def __init__(self, prefix: Path | str, *, dtype: DTypeLike) -> None:
        self.prefix = Path(prefix)
        self.dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
        self._dtype_code = dtype_code(self.dtype)
        self.num_documents = 0
        self.num_tokens = 0
        self._files = ExitStack()
        self._digest = hashlib.sha256()
        self._is_digested = True
        self._begun_bytes = 0

    @property
    def bin_sha256(self) -> str | None:
        """The hash of the `.bin` so far; None where it holds tokens that were copied from another file."""
        return self._digest.hexdigest() if self._is_digested else None

    def __enter__(self) -> Self:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as files:
            # Left in reverse order, so the .bin appears before the .idx that makes it a dataset.
            self._idx: BinaryIO = files.enter_context(written_aside(idx_path(self.prefix)))
            self._bin: BinaryIO = files.enter_context(written_aside(bin_path(self.prefix)))
            self._sizes = files.enter_context(tempfile.TemporaryFile(dir=self.prefix.parent))
            self._files = files.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._files.__exit__(kind, error, traceback)
            return
        with self._files:
            self._write_index()
            for file in (self._bin, self._idx):
                file.flush()
                os.fsync(file.fileno())
            # Never a moment with the new .bin under the old index, nor with what is told of the old one.
            manifest_path(self.prefix).unlink(missing_ok=True)
            offsets_path(self.prefix).unlink(missing_ok=True)
            idx_path(self.prefix).unlink(missing_ok=True)

    def append(self, tokens: ArrayLike) -> None:
        """Add one document.

        Raises:
            IndexedDatasetError: a token does not fit the dtype, or there are more than 2**31 - 1 of them.
        """
        row = np.asarray(tokens)
        self.append_all(row, [row.size])

    def append_all(self, tokens: ArrayLike, sizes: ArrayLike) -> None:
        """Add several documents whose tokens lie one after another.

        Args:
            tokens: one dimension, the documents' tokens.
            sizes: tokens of each document; their sum is the length of `tokens`.

        Raises:
            IndexedDatasetError: a token does not fit the dtype, or a document has more than 2**31 - 1 of
                them.
        """
        lengths = np.asarray(sizes, dtype=np.int64)
        row = self._as_dtype(np.asarray(tokens))
        if row.size != lengths.sum():
            raise ValueError(f"{row.size} tokens for documents of {lengths.sum()} in all")
        if lengths.size and lengths.max() > _INT32_MAX:
            raise IndexedDatasetError(
                f"{self.prefix}: a document of {lengths.max():,} tokens is longer than the format allows "
                f"({_INT32_MAX:,}); split it"
            )
        self._bin.write(row.data)
        self._digest.update(row.data)
        self._begin_to_store()
        self._sizes.write(lengths.astype("<i4").data)
        self.num_documents += lengths.size
        self.num_tokens += row.size

    def append_dataset(self, dataset: IndexedDataset, documents: range | None = None) -> None:
        """Add the sequences of another dataset of the same dtype, a document each, straight from its file.

        Args:
            dataset: what to add.
            documents: which of its sequences, as a range without gaps; None: all.

        Raises:
            IndexedDatasetError: its sequences do not lie one after another.
        """
        if dataset.dtype != self.dtype:
            raise ValueError(f"tokens of type {dataset.dtype} for a dataset of type {self.dtype}")
        documents = range(len(dataset)) if documents is None else documents
        if not documents:
            return
        index = dataset.index
        first, last = (index.starts.item(n) * index.start_bytes for n in (documents[0], documents[-1]))
        sizes = dataset.sizes[documents.start : documents.stop]
        num_tokens = int(sizes.sum(dtype=np.int64))
        if last + sizes.item(-1) * self.dtype.itemsize != first + num_tokens * self.dtype.itemsize:
            raise IndexedDatasetError(
                f"{dataset.prefix}: the sequences do not lie one after another; check it with "
                "neox-data verify"
            )
        self._is_digested = False
        with bin_path(dataset.prefix).open("rb") as source:
            copy_bytes(source, self._bin, first=first, count=num_tokens * self.dtype.itemsize)
        for begin in range(0, len(sizes), _CHUNK):
            self._sizes.write(sizes[begin : begin + _CHUNK].astype("<i4").data)
        self.num_documents += len(sizes)
        self.num_tokens += num_tokens

    def _begin_to_store(self) -> None:
        """Have the system write to the disk what it has, now and then, so that the end need not wait for all.

        Nothing else is asked for: what is not on the disk yet is not dropped from memory.
        """
        end = self._bin.tell()
        if hasattr(os, "posix_fadvise") and end - self._begun_bytes >= _STORED_BYTES:
            count = end - self._begun_bytes
            os.posix_fadvise(self._bin.fileno(), self._begun_bytes, count, os.POSIX_FADV_DONTNEED)
            self._begun_bytes = end

    def _as_dtype(self, tokens: np.ndarray) -> np.ndarray:
        if tokens.dtype != self.dtype and tokens.size and self.dtype.kind in "iu":
            least, most, limits = int(tokens.min()), int(tokens.max()), np.iinfo(self.dtype)
            if least < limits.min or most > limits.max:
                raise IndexedDatasetError(
                    f"{self.prefix}: token {most if most > limits.max else least} does not fit {self.dtype}; "
                    f"choose the dtype by the tokenizer's vocabulary"
                )
        return np.ascontiguousarray(tokens, dtype=self.dtype)

    def _write_index(self) -> None:
        header = np.zeros(1, MMAP_INDEX.header_dtype)
        header["magic"] = MMAP_INDEX.magic
        header["version"] = VERSION
        header["dtype_code"] = self._dtype_code
        header["num_sequences"] = self.num_documents
        header["num_document_starts"] = self.num_documents + 1
        self._idx.write(header.tobytes())
        self._sizes.seek(0)
        shutil.copyfileobj(self._sizes, self._idx)
        offset = 0
        for sizes in self._spooled_sizes():
            ends = offset + np.cumsum(sizes, dtype="<i8") * self.dtype.itemsize
            self._idx.write((ends - sizes * np.int64(self.dtype.itemsize)).data)
            offset = int(ends[-1])
        for first in range(0, self.num_documents + 1, _CHUNK):
            stop = min(first + _CHUNK, self.num_documents + 1)
            self._idx.write(np.arange(first, stop, dtype="<i8").data)

    def _spooled_sizes(self) -> Iterator[np.ndarray]:
        self._sizes.seek(0)
        while block := self._sizes.read(4 * _CHUNK):
            yield np.frombuffer(block, "<i4")

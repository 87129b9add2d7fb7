"""Write an indexed dataset in the mmap layout, atomically.

Memory does not grow with the corpus: lengths are written to an anonymous temporary file in the output folder,
from which the index is written at the end.
"""

import hashlib
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from neox_data.errors import IndexedDatasetError
from neox_data.indexed.base import IndexedDataset
from neox_data.indexed.copy import Digest, copy_bytes
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
    """Write documents, one sequence each, to `PREFIX.bin` and `PREFIX.idx`.

    Use it in a `with` block: at the end of the block the files replace existing ones of the same name; an
    exception leaves existing files unchanged.

    Args:
        prefix: path of the two files without `.bin` and `.idx`; missing folders are created.
        dtype: dtype of the tokens; see `layout.token_dtype`.

    Attributes:
        num_documents: number of documents so far.
        num_tokens: number of tokens so far.
        largest_token: largest token that was appended; -1 if there is none. Copied tokens are not counted.
    """

    def __init__(self, prefix: Path | str, *, dtype: DTypeLike) -> None:
        self.prefix = Path(prefix)
        self.dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
        self._dtype_code = dtype_code(self.dtype)
        self.num_documents = 0
        self.num_tokens = 0
        self.largest_token = -1
        self._files = ExitStack()
        self._digest = hashlib.sha256()
        self._is_digested = True
        self._begun_bytes = 0

    @property
    def bin_sha256(self) -> str | None:
        """Hash of the `.bin` so far; None if it contains tokens that were copied without a digest."""
        return self._digest.hexdigest() if self._is_digested else None

    def __enter__(self) -> Self:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as files:
            # Closed in reverse order, so that the .bin is in place before the .idx.
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
            # Remove the old files first, so that the new .bin is never next to an old index or manifest.
            manifest_path(self.prefix).unlink(missing_ok=True)
            offsets_path(self.prefix).unlink(missing_ok=True)
            idx_path(self.prefix).unlink(missing_ok=True)

    def append(self, tokens: ArrayLike) -> None:
        """Add one document.

        Raises:
            IndexedDatasetError: a token does not fit the dtype, or there are more than 2**31 - 1 tokens.
        """
        row = np.asarray(tokens)
        self.append_all(row, [row.size])

    def append_all(self, tokens: ArrayLike, sizes: ArrayLike) -> None:
        """Add several documents whose tokens are concatenated.

        Args:
            tokens: one-dimensional, the tokens of all documents.
            sizes: number of tokens of each document; the sum must be the length of `tokens`.

        Raises:
            IndexedDatasetError: a token does not fit the dtype, or a document has more than 2**31 - 1
                tokens.
        """
        lengths = np.asarray(sizes, dtype=np.int64)
        row = self._as_dtype(np.asarray(tokens))
        if row.size != lengths.sum():
            raise ValueError(f"{row.size} tokens for documents with {lengths.sum()} tokens in total")
        if lengths.size and lengths.max() > _INT32_MAX:
            raise IndexedDatasetError(
                f"{self.prefix}: a document of {lengths.max():,} tokens is longer than the format allows "
                f"({_INT32_MAX:,}); split it"
            )
        self.largest_token = max(self.largest_token, int(row.max(initial=0)) if row.size else -1)
        self._bin.write(row.data)
        self._digest.update(row.data)
        self._begin_to_store()
        self._sizes.write(lengths.astype("<i4").data)
        self.num_documents += lengths.size
        self.num_tokens += row.size

    def append_dataset(
        self, dataset: IndexedDataset, documents: range | None = None, *, digest: Digest | None = None
    ) -> None:
        """Copy sequences of another dataset of the same dtype, one document each, from its file.

        Args:
            dataset: the dataset to copy from.
            documents: contiguous range of its sequences; None: all.
            digest: is given the copied bytes; None: they are copied without being read.

        Raises:
            IndexedDatasetError: its sequences are not contiguous.
        """
        if dataset.dtype != self.dtype:
            raise ValueError(f"cannot add {dataset.dtype} tokens to a dataset of {self.dtype} tokens")
        documents = range(len(dataset)) if documents is None else documents
        if not documents:
            return
        index = dataset.index
        first, last = (index.starts.item(n) * index.start_bytes for n in (documents[0], documents[-1]))
        sizes = dataset.sizes[documents.start : documents.stop]
        num_tokens = int(sizes.sum(dtype=np.int64))
        if last + sizes.item(-1) * self.dtype.itemsize != first + num_tokens * self.dtype.itemsize:
            raise IndexedDatasetError(
                f"{dataset.prefix}: the sequences are not contiguous; "
                "check the dataset with neox-data verify",
                code="not-contiguous",
            )
        self._is_digested = self._is_digested and digest is not None
        digests = [] if digest is None else [digest, self._digest]
        with bin_path(dataset.prefix).open("rb") as source:
            copy_bytes(
                source, self._bin, first=first, count=num_tokens * self.dtype.itemsize, digests=digests
            )
        for begin in range(0, len(sizes), _CHUNK):
            self._sizes.write(sizes[begin : begin + _CHUNK].astype("<i4").data)
        self.num_documents += len(sizes)
        self.num_tokens += num_tokens

    def _begin_to_store(self) -> None:
        """Start writing finished parts to the disk, so that fsync at the end takes less time.

        POSIX_FADV_DONTNEED starts the writing; pages that are not written yet stay in memory.
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
        self._sizes.seek(0)
        while block := self._sizes.read(4 * _CHUNK):
            sizes = np.frombuffer(block, "<i4")
            ends = offset + np.cumsum(sizes, dtype="<i8") * self.dtype.itemsize
            self._idx.write((ends - sizes * np.int64(self.dtype.itemsize)).data)
            offset = int(ends[-1])
        for first in range(0, self.num_documents + 1, _CHUNK):
            stop = min(first + _CHUNK, self.num_documents + 1)
            self._idx.write(np.arange(first, stop, dtype="<i8").data)

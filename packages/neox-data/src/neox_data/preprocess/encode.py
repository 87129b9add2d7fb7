"""Encode batches of documents in parallel, in the order of the documents.

The size of a batch and the number of batches in progress are limited, so memory does not grow with the
corpus. Tokens depend only on the text, so the result is the same for any number of workers.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from neox_data.preprocess.read import Document

__all__ = ["Column", "EncodedBatch", "Encoder", "batched", "encode_batch", "encode_batches"]

# Encodes texts: returns the concatenated ids and the number of ids of each text.
Encoder = Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]

_BATCH_DOCUMENTS = 1 << 14


class Column(NamedTuple):
    """Tokens of the texts of one key, without documents whose texts are all empty.

    Attributes:
        tokens: concatenated tokens of the documents.
        sizes: number of tokens of each document.
        files: index of each document's file.
        offsets: position of each document in its file.
    """

    tokens: np.ndarray
    sizes: np.ndarray
    files: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """Consecutive documents as tokens.

    Attributes:
        columns: one per key.
        characters: number of characters of the texts, per key.
        num_documents: number of documents, including empty ones.
        num_bytes: size of the documents in the corpus.
    """

    columns: list[Column]
    characters: list[int]
    num_documents: int
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all keys."""
        return sum(column.tokens.size for column in self.columns)


class _Sized(Protocol):
    @property
    def num_bytes(self) -> int: ...


_Item = TypeVar("_Item", bound=_Sized)


def batched(items: Iterable[_Item], batch_bytes: int, most: int = sys.maxsize) -> Iterator[list[_Item]]:
    """Yield lists of consecutive items of at least `batch_bytes` bytes, or of `most` items."""
    batch: list[_Item] = []
    num_bytes = 0
    for item in items:
        batch.append(item)
        num_bytes += item.num_bytes
        if num_bytes >= batch_bytes or len(batch) >= most:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def encode_batches(
    documents: Iterable[Document],
    encode: Callable[[Sequence[Document]], EncodedBatch],
    *,
    workers: int,
    batch_bytes: int,
) -> Iterator[EncodedBatch]:
    """Yield the encoded batches in the order of the documents.

    Args:
        documents: the documents.
        encode: called from `workers` threads.
        workers: number of batches encoded at the same time.
        batch_bytes: approximate size of a batch in the corpus.
    """
    pending: deque[Future[EncodedBatch]] = deque()
    executor = ThreadPoolExecutor(workers, "encode")
    try:
        for batch in batched(documents, batch_bytes, _BATCH_DOCUMENTS):
            pending.append(executor.submit(encode, batch))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def encode_batch(
    batch: Sequence[Document], encoder: Encoder, dtype: np.dtype[np.generic], end_of_document: int | None
) -> EncodedBatch:
    """Encode documents with one text per key to one column per key.

    Args:
        batch: the documents.
        encoder: encodes texts.
        dtype: dtype of the tokens.
        end_of_document: token appended to each document that is kept; None: no token.
    """
    files = np.fromiter((document.file for document in batch), np.int64, len(batch))
    offsets = np.fromiter((document.offset for document in batch), np.int64, len(batch))
    keys = list(zip(*(document.texts for document in batch), strict=True))
    encoded = [encoder(texts) for texts in keys]
    # A document is the same one in every dataset, so that its texts can be found by its number.
    kept = np.logical_or.reduce([sizes > 0 for _, sizes in encoded])
    columns = [
        Column(*_ended(tokens.astype(dtype), sizes[kept], end_of_document), files[kept], offsets[kept])
        for tokens, sizes in encoded
    ]
    characters = [sum(map(len, texts)) for texts in keys]
    return EncodedBatch(columns, characters, len(batch), sum(document.num_bytes for document in batch))


def _ended(
    tokens: np.ndarray, sizes: np.ndarray, end_of_document: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Append `end_of_document` to each document; return tokens and sizes."""
    if end_of_document is None:
        return tokens, sizes
    return np.insert(tokens, np.cumsum(sizes), end_of_document), sizes + 1

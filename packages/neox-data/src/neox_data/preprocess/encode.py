"""Batches of documents -> token ids, several batches at a time, delivered in the order of the documents.

A batch is bounded by its text, and only a few are under way at once, so memory does not grow with the corpus.
What a document becomes depends on its text alone, so the result is the same for any number of workers.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from neox_data.preprocess.read import Document

__all__ = ["Column", "EncodedBatch", "Encoder", "batched", "encode_all"]

# The ids of some texts one after another, and how many each has.
Encoder = Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]

_BATCH_DOCUMENTS = 1 << 14


class Column(NamedTuple):
    """What the texts of one key became; documents that gave no token are left out.

    Attributes:
        tokens: of the documents, one after another.
        sizes: tokens of each document.
        files: number of the file that each document is from.
        offsets: where it begins there.
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
        characters: of the texts, per key.
        num_documents: documents of the batch, those without tokens included.
        num_bytes: their size in the corpus.
    """

    columns: list[Column]
    characters: list[int]
    num_documents: int
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all keys."""
        return sum(column.tokens.size for column in self.columns)


def batched(documents: Iterable[Document], batch_bytes: int) -> Iterator[list[Document]]:
    """Consecutive documents in lists of about so many bytes."""
    batch: list[Document] = []
    num_bytes = 0
    for document in documents:
        batch.append(document)
        num_bytes += document.num_bytes
        if num_bytes >= batch_bytes or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def encode_all(
    documents: Iterable[Document],
    encoder: Encoder,
    *,
    dtype: np.dtype[np.generic],
    end_of_document: int | None,
    workers: int,
    batch_bytes: int,
) -> Iterator[EncodedBatch]:
    """The documents as tokens, batch by batch in their order.

    Args:
        documents: with one text per key.
        encoder: is called from `workers` threads.
        dtype: of the tokens.
        end_of_document: the token to end each document with that has tokens; None: none.
        workers: batches that are encoded at the same time.
        batch_bytes: of corpus in a batch, about.
    """
    pending: deque[Future[EncodedBatch]] = deque()
    executor = ThreadPoolExecutor(workers, "encode")
    try:
        for batch in batched(documents, batch_bytes):
            pending.append(executor.submit(_encode, batch, encoder, dtype, end_of_document))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _encode(
    batch: Sequence[Document], encoder: Encoder, dtype: np.dtype[np.generic], end_of_document: int | None
) -> EncodedBatch:
    columns, characters = [], []
    files = np.fromiter((document.file for document in batch), np.int64, len(batch))
    offsets = np.fromiter((document.offset for document in batch), np.int64, len(batch))
    for texts in zip(*(document.texts for document in batch), strict=True):
        tokens, sizes = encoder(texts)
        kept = sizes > 0
        ended = _ended(tokens.astype(dtype), sizes[kept], end_of_document)
        columns.append(Column(*ended, files[kept], offsets[kept]))
        characters.append(sum(map(len, texts)))
    return EncodedBatch(columns, characters, len(batch), sum(document.num_bytes for document in batch))


def _ended(
    tokens: np.ndarray, sizes: np.ndarray, end_of_document: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """The documents with `end_of_document` after each."""
    if end_of_document is None:
        return tokens, sizes
    ends = np.cumsum(sizes + 1) - 1
    ended = np.full(tokens.size + sizes.size, end_of_document, tokens.dtype)
    is_text = np.ones(ended.size, dtype=bool)
    is_text[ends] = False
    ended[is_text] = tokens
    return ended, sizes + 1

"""Derive document ids and position ids from the end-of-document tokens of a batch.

The results are arrays of the batch's shape. Attention within documents is computed from document ids, so no
mask of sequence x sequence is needed.
"""

import numpy as np

__all__ = ["document_ids", "position_ids"]


def document_ids(tokens: np.ndarray, end_of_document: int) -> np.ndarray:
    """Return the document id of each token, from 0 in each row.

    An end-of-document token belongs to the document that it ends.

    Args:
        tokens: integers [batch, sequence].
        end_of_document: the token that ends a document.

    Returns:
        int64 [batch, sequence].
    """
    ends = tokens == end_of_document
    documents = np.zeros(tokens.shape, dtype=np.int64)
    np.cumsum(ends[:, :-1], axis=1, out=documents[:, 1:])
    return documents


def position_ids(tokens: np.ndarray, end_of_document: int | None = None) -> np.ndarray:
    """Return the position id of each token in its row, restarting at 0 after each `end_of_document` token.

    Args:
        tokens: integers [batch, sequence].
        end_of_document: the end-of-document token; None: positions do not restart.

    Returns:
        int64 [batch, sequence].
    """
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int64), tokens.shape)
    if end_of_document is None:
        return positions.copy()
    begins = np.zeros(tokens.shape, dtype=np.int64)
    begins[:, 1:] = np.where(tokens[:, :-1] == end_of_document, positions[:, 1:], 0)
    return positions - np.maximum.accumulate(begins, axis=1)

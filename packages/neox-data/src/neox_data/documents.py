"""What follows from the end-of-document tokens of a batch: which document, which position, what counts.

Plain arrays of the batch's own shape. Attention inside documents is decided from the document numbers, so no
mask of sequence times sequence is ever made.
"""

import numpy as np

__all__ = ["document_ids", "loss_mask", "position_ids"]


def document_ids(tokens: np.ndarray, end_of_document: int) -> np.ndarray:
    """Number of the document that each token belongs to, from 0 in each row.

    The end-of-document token still belongs to the document that it ends.

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
    """Place of each token in its row, from 0 again after each `end_of_document` token.

    Args:
        tokens: integers [batch, sequence].
        end_of_document: the token that ends a document; None: positions run through the row.

    Returns:
        int64 [batch, sequence].
    """
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int64), tokens.shape)
    if end_of_document is None:
        return positions.copy()
    begins = np.zeros(tokens.shape, dtype=np.int64)
    begins[:, 1:] = np.where(tokens[:, :-1] == end_of_document, positions[:, 1:], 0)
    return positions - np.maximum.accumulate(begins, axis=1)


def loss_mask(tokens: np.ndarray, end_of_document: int | None = None) -> np.ndarray:
    """1 where the prediction made from a token counts, 0 where the token ends a document.

    Args:
        tokens: integers [batch, sequence], the model's input.
        end_of_document: the token that ends a document; None: every prediction counts.

    Returns:
        float32 [batch, sequence].
    """
    if end_of_document is None:
        return np.ones(tokens.shape, dtype=np.float32)
    return np.asarray(tokens != end_of_document, dtype=np.float32)

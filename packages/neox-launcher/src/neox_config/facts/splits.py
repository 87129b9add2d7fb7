"""How documents are split into training, validation and test."""

import re
from itertools import accumulate, pairwise

__all__ = ["EVALUATED", "PARTS", "empty_parts", "parts_with_documents", "training_documents"]

PARTS = ("train", "valid", "test")
EVALUATED = ("valid", "test")


def empty_parts(split: str, num_documents: int) -> list[str]:
    """Return the parts that have a share of the split, but not a single document.

    Args:
        split: up to three relative shares separated by commas or slashes.
        num_documents: number of documents.
    """
    shares = _shares(split)
    counts = _counts(shares, num_documents)
    return [part for part, share, count in zip(PARTS, shares, counts, strict=False) if share and count <= 0]


def parts_with_documents(split: str, num_documents: int) -> list[str]:
    """Return the parts that have documents.

    Args:
        split: up to three relative shares separated by commas or slashes.
        num_documents: number of documents.
    """
    counts = _counts(_shares(split), num_documents)
    return [part for part, count in zip(PARTS, counts, strict=False) if count > 0]


def training_documents(split: str, num_documents: int) -> int:
    """Return the number of documents for training; they are the first of the dataset.

    Args:
        split: up to three relative shares separated by commas or slashes.
        num_documents: number of documents.
    """
    return _counts(_shares(split), num_documents)[0]


def _shares(split: str) -> list[float]:
    return [float(word) for word in re.split(r"[,/]", split)][: len(PARTS)]


def _counts(shares: list[float], num_documents: int) -> list[int]:
    """Return the number of documents of each part; at most 0 where there is none."""
    total = 0.0
    for share in shares:
        # One by one: the builtin sum rounds differently since Python 3.12.
        total += share
    boundaries = [0, *accumulate(round(share / total * num_documents) for share in shares)]
    excess = boundaries[-1] - num_documents
    boundaries[1:] = [max(0, boundary - excess) for boundary in boundaries[1:]]
    return [end - start for start, end in pairwise(boundaries)]

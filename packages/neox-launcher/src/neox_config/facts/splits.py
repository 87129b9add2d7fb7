"""How documents are split into training, validation and test."""

import re
from itertools import accumulate, pairwise

__all__ = [
    "EVALUATED",
    "PARTS",
    "documents_by_part",
    "empty_parts",
    "parts_with_documents",
    "parts_without_share",
    "shares_left_out",
    "training_documents",
]

PARTS = ("train", "valid", "test")
EVALUATED = ("valid", "test")


def documents_by_part(split: str, num_documents: int) -> dict[str, range]:
    """Return the documents of each part that the split names, as consecutive ranges; one may be empty.

    Args:
        split: up to three relative shares separated by commas or slashes.
        num_documents: number of documents.
    """
    shares = _shares(split)
    total = 0.0
    for share in shares:
        # One by one: the builtin sum rounds differently since Python 3.12.
        total += share
    boundaries = [0, *accumulate(round(share / total * num_documents) for share in shares)]
    excess = boundaries[-1] - num_documents
    boundaries[1:] = [max(0, boundary - excess) for boundary in boundaries[1:]]
    return {part: range(*ends) for part, ends in zip(PARTS, pairwise(boundaries), strict=False)}


def empty_parts(split: str, num_documents: int) -> list[str]:
    """Return the parts that have a share of the split, but not a single document; arguments as above."""
    documents = documents_by_part(split, num_documents)
    return [part for part, share in zip(PARTS, _shares(split), strict=False) if share and not documents[part]]


def parts_with_documents(split: str, num_documents: int) -> list[str]:
    """Return the parts that have documents; arguments as above."""
    return [part for part, documents in documents_by_part(split, num_documents).items() if documents]


def parts_without_share(split: str) -> list[str]:
    """Return the parts whose share is 0 or left out."""
    shares = [*_shares(split), *[0.0] * shares_left_out(split)]
    return [part for part, share in zip(PARTS, shares, strict=True) if not share]


def shares_left_out(split: str) -> int:
    """Return how many of the three shares are not written."""
    return len(PARTS) - len(_shares(split))


def training_documents(split: str, num_documents: int) -> int:
    """Return the number of documents for training; they are the first of the dataset. Arguments as above."""
    return len(documents_by_part(split, num_documents)["train"])


def _shares(split: str) -> list[float]:
    return [float(word) for word in re.split(r"[,/]", split)][: len(PARTS)]

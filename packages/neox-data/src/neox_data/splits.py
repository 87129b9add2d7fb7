"""Split documents into training, validation and test: "969, 30, 1" -> three ranges."""

import math
import re
from itertools import accumulate, pairwise

from neox_data.errors import DataError
from neox_data.weights import plain_sum

__all__ = ["PARTS", "split_documents"]

PARTS = ("train", "valid", "test")


def split_documents(split: str, num_documents: int) -> dict[str, range]:
    """Return the documents of each part, as consecutive ranges; a range may be empty.

    Args:
        split: up to three relative shares separated by commas or slashes; missing shares are 0, additional
            ones are ignored.
        num_documents: number of documents.

    Raises:
        DataError: a share is not a number of at least 0, all are 0, or their sum is not finite.

    Source: Megatron-LM's split, rounding included: the boundaries are rounded one by one, and what the last
        one exceeds `num_documents` by is taken from all but the first.
    """
    try:
        shares = [float(word) for word in re.split(r"[,/]", split)[: len(PARTS)]]
    except ValueError:
        raise DataError(f'split {split!r} is not a list of numbers; write it like "969, 30, 1"') from None
    total = plain_sum(shares)
    if not (min(shares) >= 0 and 0 < total < math.inf):
        raise DataError(
            f"split {split!r} must have shares of at least 0, one of them above 0, and their sum finite; "
            'write it like "969, 30, 1"'
        )
    shares += [0.0] * (len(PARTS) - len(shares))
    boundaries = [0, *accumulate(round(share / total * num_documents) for share in shares)]
    excess = boundaries[-1] - num_documents
    # The original's boundary can fall to -1 where the first shares are tiny; no document has that number.
    boundaries[1:] = [max(0, boundary - excess) for boundary in boundaries[1:]]
    return {part: range(*ends) for part, ends in zip(PARTS, pairwise(boundaries), strict=True)}

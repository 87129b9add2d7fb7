"""Histogram of document lengths as text."""

from collections.abc import Iterator

import numpy as np

__all__ = ["histogram_lines", "length_counts"]

_CHUNK = 1 << 22
_BAR = 40


def length_counts(sizes: np.ndarray) -> np.ndarray:
    """Count documents by length: entry 0 for empty ones, entry b for 2**(b-1) to 2**b - 1 tokens; int64."""
    edges = np.concatenate([[0], 2 ** np.arange(32, dtype=np.int64)])
    counts = np.zeros(len(edges), np.int64)
    for first in range(0, len(sizes), _CHUNK):
        bins = np.searchsorted(edges, sizes[first : first + _CHUNK], side="right") - 1
        counts += np.bincount(bins, minlength=len(edges))
    return counts


def histogram_lines(sizes: np.ndarray) -> Iterator[str]:
    """Yield a line for each range of lengths, from the shortest to the longest document."""
    counts = length_counts(sizes)
    used = np.flatnonzero(counts)
    if not used.size:
        return
    for number in range(used[0], used[-1] + 1):
        count = counts.item(number)
        least, most = (0, 0) if number == 0 else (1 << (number - 1), (1 << number) - 1)
        bar = "#" * -(-count * _BAR // int(counts.max()))
        yield f"{f'{least:,} to {most:,}' if most > least else f'{most:,}':>29} {count:>15,}  {bar}".rstrip()

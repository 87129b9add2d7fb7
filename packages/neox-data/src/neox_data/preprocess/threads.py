"""Threads that encode documents."""

import os
import sys

__all__ = ["prepare_threads"]


def prepare_threads(wanted: int | None = None) -> int:
    """Prepare this process for encoding in threads; return their number, by default that of the cores."""
    count = wanted or len(os.sched_getaffinity(0))
    # Threads that read, encode and hash wait for each other many times per batch; by default each wait is ten
    # times as long.
    sys.setswitchinterval(0.0005)
    # The tokenizers library starts this many threads at the first batch.
    os.environ["RAYON_NUM_THREADS"] = str(count)
    return count

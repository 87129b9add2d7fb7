"""Compute the checksums of a shard's pieces in several threads. Imports no torch."""

import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["Checksums"]

_MOST_THREADS = 4


class Checksums(ThreadPoolExecutor):
    """CRC-32 checksums of pieces that are added one after another; zlib releases the interpreter's lock.

    At most as many pieces as there are threads, and the last one, are held in memory.
    """

    def __init__(self) -> None:
        # Several ranks of a host compute checksums at the same time.
        self._ahead = min(_MOST_THREADS, os.cpu_count() or 1)
        super().__init__(self._ahead, thread_name_prefix="checksum")
        self._sums: list[Future[int]] = []

    def add(self, data: memoryview) -> None:
        """Add the next piece."""
        self._sums.append(self.submit(zlib.crc32, data))
        if len(self._sums) > self._ahead:
            self._sums[-1 - self._ahead].result()

    def results(self) -> list[int]:
        """Return the checksums of all pieces, in their order."""
        return [each.result() for each in self._sums]

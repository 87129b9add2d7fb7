"""Compute the checksums of a shard's pieces in several threads. Imports no torch."""

import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

__all__ = ["Checksums"]

_MOST_THREADS = 4


class Checksums:
    """CRC-32 checksums of pieces that are added one after another; zlib releases the interpreter's lock.

    At most as many pieces as there are threads, and the last one, are held in memory.
    """

    def __init__(self) -> None:
        # Several ranks of a host compute checksums at the same time.
        self._threads = min(_MOST_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="checksum")
        self._sums: list[Future[int]] = []

    def __enter__(self) -> "Checksums":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, data: memoryview) -> None:
        """Add the next piece."""
        self._sums.append(self._pool.submit(zlib.crc32, data))
        if len(self._sums) > self._threads:
            self._sums[-1 - self._threads].result()

    def results(self) -> list[int]:
        """Return the checksums of all pieces, in their order."""
        return [each.result() for each in self._sums]

"""A lock between processes, released when its holder ends; waiting is logged and limited."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from neox_kernels.errors import KernelBuildError

__all__ = ["hold_lock"]

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
FIRST_MESSAGE_SECONDS = 1.0
REMIND_SECONDS = 30.0


@contextmanager
def hold_lock(path: Path, *, timeout_seconds: float, purpose: str) -> Iterator[None]:
    """Hold the lock of a file while the block runs.

    The kernel releases the lock when its holder ends, even if it is killed. The file names the holder, which
    filelock does not record, so that a process that waits can report whom it waits for.

    Args:
        path: the lock file; created if it does not exist, not removed.
        timeout_seconds: limit for waiting for another holder.
        purpose: what the holder does, for messages.

    Raises:
        KernelBuildError: another process still holds the lock after the timeout.
    """
    # Without kernel locks, filelock would fall back to a file that a killed holder leaves locked.
    lock = FileLock(path, mode=0o600, poll_interval=POLL_SECONDS, fallback_to_soft=False)
    _wait_for(lock, path, timeout_seconds, purpose)
    try:
        path.write_text(f"process {os.getpid()} on {os.uname().nodename}", encoding="utf-8")
        yield
    finally:
        lock.release()


def _wait_for(lock: FileLock, path: Path, timeout_seconds: float, purpose: str) -> None:
    start, patience = time.monotonic(), FIRST_MESSAGE_SECONDS
    while True:
        left = timeout_seconds - (time.monotonic() - start)
        try:
            lock.acquire(timeout=max(0.0, min(patience, left)))
            return
        except Timeout:
            holder = "another process"
        # It may be removed by hand, readable only by its holder, or not written yet.
        with suppress(OSError):
            holder = path.read_text(encoding="utf-8", errors="replace")[:200] or holder
        waited = time.monotonic() - start
        if waited >= timeout_seconds:
            raise KernelBuildError(
                f"{holder} has held {path} for {timeout_seconds:.0f} s ({purpose}); end that process, or "
                "set NEOX_KERNELS_BUILD_TIMEOUT=SECONDS to wait longer"
            )
        logger.warning("waiting for %s: %s (%.0f s so far)", holder, purpose, waited)
        patience = REMIND_SECONDS

"""A lock between processes that ends with its holder, and is waited for with a message and a limit."""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neox_kernels.errors import KernelBuildError

__all__ = ["hold_lock"]

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
REMIND_SECONDS = 30.0


@contextmanager
def hold_lock(path: Path, *, timeout_seconds: float, purpose: str) -> Iterator[None]:
    """Hold the lock of a file while the block runs.

    The kernel frees the lock when its holder ends, however it ends: no lock is left behind.

    Args:
        path: the lock file; made if it does not exist, and left.
        timeout_seconds: how long to wait for another holder.
        purpose: what the holder does, for messages.

    Raises:
        KernelBuildError: another process still holds the lock after the limit.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _wait_for(descriptor, path, timeout_seconds, purpose)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, path: Path, timeout_seconds: float, purpose: str) -> None:
    start = time.monotonic()
    next_message = start + 1.0
    while not _try_lock(descriptor):
        now = time.monotonic()
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        if now - start > timeout_seconds:
            raise KernelBuildError(
                f"{holder} has held {path} for {timeout_seconds:.0f} s ({purpose}); end that process, or "
                "wait "
                "longer with NEOX_KERNELS_BUILD_TIMEOUT=SECONDS"
            )
        if now > next_message:
            logger.warning("waiting for %s: %s (%.0f s so far)", holder, purpose, now - start)
            next_message = now + REMIND_SECONDS
        time.sleep(POLL_SECONDS)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

"""Output of the launcher and of the workers to the terminal.

It never blocks and never ends a job: threads write it, so that a reader that stops (a pager, a stalled
connection) only delays it. What exceeds a limit is dropped, with a line that states how much. If the reader
is gone (`| head`, a closed terminal), further output is discarded.
"""

import errno
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from neox_launcher.protocol.background import BackgroundQueue, LossyFile, describe_loss

__all__ = ["finish_output", "pass_on", "print_message", "settle_output", "wait_for_slow_readers"]

_LIMIT = 16 * 1024 * 1024
_CHUNK = 16 * 1024
_SETTLE_SECONDS = 1.0
_SLOW_SECONDS = 0.5
_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 60.0
_KEEP_SECONDS = 10.0
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NAMES = {1: "standard output", 2: "standard error"}
_SLOW = "the reader of this output was too slow"


class _Outputs:
    """The queues of the standard streams, one for each file, so that a terminal shows lines in order."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], BackgroundQueue[tuple[int, bytes]]] = {}
        self._files: dict[int, LossyFile] = {}

    def put(self, descriptor: int, data: bytes, *, is_kept: bool) -> None:
        queue = self._queue_of(descriptor)
        for start in range(0, len(data), _CHUNK):
            chunk = data[start : start + _CHUNK]
            queue.put((descriptor, chunk), len(chunk), is_kept=is_kept)

    @property
    def are_behind(self) -> bool:
        return any(queue.is_behind for queue in self._all())

    def settle(self, seconds: float) -> None:
        for queue in self._all():
            queue.wait(seconds)

    def finish(self, patience: float) -> bytes:
        """Write everything; return what a reader has left unread for `patience` seconds, or until Ctrl-C."""
        unread = b""
        for queue in self._all():
            try:
                has_finished = queue.wait(patience, is_patient=True)
            except KeyboardInterrupt:
                has_finished = False
            if not has_finished:
                left = queue.discard()
                unread += b"".join(data for _, data in left)
                for descriptor in {descriptor for descriptor, _ in left}:
                    _discard_further_output(descriptor)
        return unread

    def _all(self) -> Iterator[BackgroundQueue[tuple[int, bytes]]]:
        """Yield all queues, including those that warnings of their threads add meanwhile."""
        number = 0
        while number < len(self._queues):
            yield list(self._queues.values())[number]
            number += 1

    def _queue_of(self, descriptor: int) -> BackgroundQueue[tuple[int, bytes]]:
        found = os.fstat(descriptor)
        key = (found.st_dev, found.st_ino)
        if key not in self._queues:
            queue = BackgroundQueue(
                self._write,
                limit=_LIMIT,
                loss_item=lambda size: (descriptor, describe_loss(size, _SLOW)),
                name=f"output-{descriptor}",
            )
            # Two threads may do so at the same time.
            self._queues.setdefault(key, queue)
        return self._queues[key]

    def _write(self, item: tuple[int, bytes]) -> None:
        descriptor, data = item
        if descriptor not in self._files:
            self._files[descriptor] = LossyFile(descriptor, report=partial(_on_error, descriptor))
        self._files[descriptor].write(data)


_outputs = _Outputs()


def print_message(text: str) -> None:
    """Print a message to stderr."""
    _put(sys.stderr, text.encode(errors="backslashreplace"), is_kept=True)


def pass_on(stream: TextIO | None, data: bytes) -> None:
    """Print the output of a worker.

    Args:
        stream: sys.stdout or sys.stderr; None to discard it.
        data: output of the worker, unchanged.
    """
    _put(stream, data, is_kept=False)


def wait_for_slow_readers() -> None:
    """Wait a moment if much output waits for readers that are slow, but have not stopped."""
    deadline = time.monotonic() + _SLOW_SECONDS
    while _outputs.are_behind and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def settle_output() -> None:
    """Wait a moment for what was printed, so that it precedes what others print."""
    _outputs.settle(_SETTLE_SECONDS)


def finish_output() -> None:
    """Wait until everything is printed; write what a reader leaves unread for a minute to a file.

    Call it before the interpreter exits, because Python 3.12 cannot start threads in functions of `atexit`.
    Returns in bounded time, whatever hangs or is full: a reader, a disk or a file server.
    """
    unread = _outputs.finish(_PATIENCE_SECONDS)
    if unread:
        print_message(f"\nneox-launch: {len(unread):,} bytes of output were not read; {_keep(unread)}\n")
    settle_output()  # Warnings about what has just been printed.


def _keep(unread: bytes) -> str:
    """Write output to a file in the working directory; return where it is, or why it is lost."""
    path = Path(time.strftime("neox-launch-unread-%Y%m%d-%H%M%S.log")).absolute()

    def write(data: bytes) -> None:
        path.write_bytes(data)

    # In the background: the file server of the working directory may hang.
    writer = BackgroundQueue(write, limit=0, loss_item=bytes, name="unread-output")
    writer.put(unread, 0, is_kept=True)
    is_written = writer.wait(_KEEP_SECONDS)
    try:
        writer.check()
    except OSError as error:
        return f"they are lost, because {path} cannot be written: {error.strerror}"
    return f"they are in {path}" if is_written else f"they are lost, because {path.parent} does not answer"


def _put(stream: TextIO | None, data: bytes, *, is_kept: bool) -> None:
    if stream is None or not data:
        return
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        # Not a file: a stream that a program or a test has put in its place.
        stream.write(data.decode(errors="replace"))
        return
    with suppress(OSError):  # Closed, or its reader is gone.
        stream.flush()
        _outputs.put(descriptor, data, is_kept=is_kept)


def _on_error(descriptor: int, error: OSError) -> None:
    """Give up on a reader that is gone; output to a file continues when it can be written again."""
    if error.errno not in _FULL_DISK and not stat.S_ISREG(os.fstat(descriptor).st_mode):
        _discard_further_output(descriptor)
        return
    name = _NAMES.get(descriptor, "output")
    print_message(
        f"neox-launch: warning: {name} cannot be written: {error.strerror}; output is missing from it, the "
        "job continues\n"
    )


def _discard_further_output(descriptor: int) -> None:
    """Redirect to /dev/null, because Python flushes remaining buffers when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)

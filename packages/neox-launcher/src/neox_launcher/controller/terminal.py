"""Output of the launcher and of the workers to the terminal.

It never blocks and never ends a job: threads write it, so that a reader that stops (a pager, a stalled
connection) only delays it. What exceeds a limit is dropped, with a line that states how much. If the reader
is gone (`| head`, a closed terminal), further output is discarded.

On a terminal, a line may be drawn below all other output (`start_drawing`).
"""

import itertools
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TextIO

from neox_config.atomic import NO_ROOM
from neox_launcher.protocol.background import BackgroundQueue, LossyFile, describe_loss, ends_within

__all__ = [
    "Line",
    "finish_output",
    "finished_output",
    "pass_on",
    "print_message",
    "settle_output",
    "start_drawing",
    "stop_drawing",
    "wait_for_slow_readers",
]

_LIMIT = 16 * 1024 * 1024
_CHUNK = 16 * 1024
_SETTLE_SECONDS = 1.0
_SLOW_SECONDS = 0.5
_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 60.0
_KEEP_SECONDS = 10.0
_NAMES = {1: "standard output", 2: "standard error"}
_SLOW = "the reader of this output was too slow"

Source = Literal["launcher", "workers"]


class _Piece(NamedTuple):
    """A part of the output, in the order in which it is written.

    Args:
        descriptor: file to write to.
        data: the output.
        source: where the output comes from; lines of several sources do not mix.
        act: called in place of writing.
    """

    descriptor: int
    data: bytes
    source: Source = "launcher"
    act: Callable[[], None] | None = None


class Line(Protocol):
    """A line below all other output of a terminal; only the thread that writes calls it."""

    def start(self) -> None:
        """Draw the line from now on."""

    def write(self, source: object, data: bytes) -> None:
        """Show other output above the line; lines of several sources do not mix."""

    def stop(self) -> None:
        """Remove the line, and show what was held back."""


class _Outputs:
    """The queues of the standard streams, one for each file, so that a terminal shows lines in order."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], BackgroundQueue[_Piece]] = {}
        self._files: dict[int, LossyFile] = {}
        self._drawn_on = -1
        self._line: Line | None = None

    def put(self, descriptor: int, data: bytes, source: Source, *, is_kept: bool) -> None:
        queue = self._queue_of(descriptor)
        for start in range(0, len(data), _CHUNK):
            chunk = data[start : start + _CHUNK]
            queue.put(_Piece(descriptor, chunk, source), len(chunk), is_kept=is_kept)

    def start_drawing(self, stream: TextIO, open_line: Callable[[Callable[[bytes], None]], Line]) -> None:
        """Draw a line below all other output of a terminal.

        Args:
            stream: sys.stdout or sys.stderr, a terminal.
            open_line: returns the line, which draws with the given function.
        """
        self._drawn_on = stream.fileno()
        self._act_on_line(lambda: self._start(open_line(self._file(self._drawn_on).write)))

    def stop_drawing(self) -> None:
        """Remove the line, after everything that was printed before; may be called again."""
        self._act_on_line(self._stop)

    def _act_on_line(self, act: Callable[[], None]) -> None:
        with suppress(OSError):  # The terminal is gone.
            self._queue_of(self._drawn_on).put(_Piece(self._drawn_on, b"", act=act), 0, is_kept=True)

    def _start(self, line: Line) -> None:
        self._line = line
        line.start()

    def _stop(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.stop()

    @property
    def are_behind(self) -> bool:
        return any(queue.is_behind for queue in self._all())

    def settle(self) -> None:
        """Wait a moment for what was printed, so that it precedes what others print."""
        for queue in self._all():
            queue.wait(_SETTLE_SECONDS)

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
                unread += b"".join(piece.data for piece in left)
                for descriptor in {piece.descriptor for piece in left}:
                    _discard_further_output(descriptor)
        return unread

    def _all(self) -> Iterator[BackgroundQueue[_Piece]]:
        """Yield all queues, including those that warnings of their threads add meanwhile."""
        for number in itertools.count():
            if number == len(self._queues):
                return
            yield list(self._queues.values())[number]

    def _queue_of(self, descriptor: int) -> BackgroundQueue[_Piece]:
        key = _identity(descriptor)
        if key not in self._queues:
            queue = BackgroundQueue(
                self._write,
                limit=_LIMIT,
                loss_item=lambda size: _Piece(descriptor, describe_loss(size, _SLOW)),
                name=f"output-{descriptor}",
            )
            # Two threads may do so at the same time.
            self._queues.setdefault(key, queue)
        return self._queues[key]

    def _write(self, piece: _Piece) -> None:
        if piece.act is not None:
            piece.act()
        elif self._line is not None and _identity(piece.descriptor) == _identity(self._drawn_on):
            self._line.write((piece.descriptor, piece.source), piece.data)
        else:
            self._file(piece.descriptor).write(piece.data)

    def _file(self, descriptor: int) -> LossyFile:
        if descriptor not in self._files:
            self._files[descriptor] = LossyFile(descriptor, report=partial(_on_error, descriptor))
        return self._files[descriptor]


_outputs = _Outputs()
start_drawing = _outputs.start_drawing
stop_drawing = _outputs.stop_drawing
settle_output = _outputs.settle


def print_message(text: str) -> None:
    """Print a message to stderr."""
    _put(sys.stderr, text.encode(errors="backslashreplace"), "launcher", is_kept=True)


def pass_on(stream: TextIO | None, data: bytes) -> None:
    """Print the output of a worker.

    Args:
        stream: sys.stdout or sys.stderr; None to discard it.
        data: output of the worker, unchanged.
    """
    _put(stream, data, "workers", is_kept=False)


def wait_for_slow_readers() -> None:
    """Wait a moment if much output waits for readers that are slow, but have not stopped."""
    deadline = time.monotonic() + _SLOW_SECONDS
    while _outputs.are_behind and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def finish_output() -> None:
    """Wait until everything is printed; write what a reader leaves unread for a minute to a file.

    Call it before the interpreter exits, because Python 3.12 cannot start threads in functions of `atexit`.
    Returns in bounded time, whatever hangs or is full: a reader, a disk or a file server.
    """
    unread = _outputs.finish(_PATIENCE_SECONDS)
    if unread:
        print_message(f"\nneox-launch: {len(unread):,} bytes of output were not read; {_keep(unread)}\n")
    settle_output()  # Warnings about what has just been printed.


@contextmanager
def finished_output() -> Iterator[None]:
    """Print everything before the context ends; Ctrl-C or a lost folder then change no exit code."""
    try:
        yield
    finally:
        with suppress(KeyboardInterrupt, OSError):
            finish_output()


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _keep(unread: bytes) -> str:
    """Write output to a file in the working directory; return where it is, or why it is lost."""
    path = Path(time.strftime("neox-launch-unread-%Y%m%d-%H%M%S.log")).absolute()
    try:
        # The file server of the working directory may hang.
        if ends_within(_KEEP_SECONDS, partial(path.write_bytes, unread), name="unread-output"):
            return f"they are in {path}"
    except OSError as error:
        return f"they are lost, because {path} cannot be written: {error.strerror}"
    return f"they are lost, because {path.parent} does not answer"


def _put(stream: TextIO | None, data: bytes, source: Source, *, is_kept: bool) -> None:
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
        _outputs.put(descriptor, data, source, is_kept=is_kept)


def _on_error(descriptor: int, error: OSError) -> None:
    """Give up on a reader that is gone; output to a file continues when it can be written again."""
    if error.errno not in NO_ROOM and not stat.S_ISREG(os.fstat(descriptor).st_mode):
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

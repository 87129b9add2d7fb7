"""Output of the workers of one host: each rank writes to pipes that its agent reads.

The output of a rank goes to the launcher's terminal, to a file, to both, or is discarded. Its last lines are
always kept, for the failure report. A log file that cannot be written (a full disk) leads to a warning and
to gaps, never to the end of a worker.
"""

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from neox_config.facts.records import output_name
from neox_launcher.protocol.background import BackgroundQueue, LossyFile, describe_loss
from neox_launcher.worker.bootstrap import OUTPUT_STREAMS, output_pipe

__all__ = ["OutputPipes", "Show"]

Show = Callable[[int, str, bytes], None]
"""Called with rank, name of the stream and bytes of output for the terminal."""

_CHUNK = 64 * 1024
_TAIL_BYTES = 16 * 1024
_LOG_LIMIT = 4 * 1024 * 1024
_SLOW_DISK = "the disk was too slow for these ranks"
_LOG_PATIENCE_SECONDS = 5.0


class _Stream:
    """Read end of one pipe, with the incomplete last line."""

    def __init__(self, folder: Path, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        path = output_pipe(folder, rank, name)
        os.mkfifo(path, mode=0o600)
        # Also open for writing, so that the pipe does not end when workers close it.
        self.descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self.rest = b""

    def read(self) -> bytes:
        try:
            return os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return b""

    def whole_lines(self, data: bytes) -> bytes:
        """Return the lines that this data completes; very long lines are split."""
        data = self.rest + data
        end = data.rfind(b"\n") + 1 if len(data) < _CHUNK else len(data)
        self.rest = data[end:]
        return data[:end]


class OutputPipes:
    """The pipes of all ranks of a host.

    Args:
        folder: folder of the pipes.
        ranks: ranks that get pipes.
        shown: ranks whose output is shown on the terminal.
        by_lines: show whole lines only, so that the lines of several ranks do not mix.
        files: folder for the files of output; None to write none.
        logged: ranks whose output is written to files.
        keeps_terminal: streams of rank 0 that get no pipe, because it uses the launcher's terminal itself.
        show: called with the output to show, and with warnings about files; must not block.

    Raises:
        OSError: a pipe cannot be created.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Sequence[int],
        *,
        shown: Sequence[int],
        by_lines: bool,
        files: Path | None,
        logged: Sequence[int],
        show: Show,
        keeps_terminal: Collection[str] = (),
    ) -> None:
        names = [
            (rank, name) for rank in ranks for name in OUTPUT_STREAMS if rank or name not in keeps_terminal
        ]
        self._streams = {stream.descriptor: stream for stream in (_Stream(folder, *name) for name in names)}
        self._tails = dict.fromkeys(ranks, b"")
        self._shown, self._by_lines, self._show = frozenset(shown), by_lines, show
        self._files = None if files is None else _LogFiles(files, logged, self._show)

    @property
    def descriptors(self) -> list[int]:
        """File descriptors for a selector."""
        return list(self._streams)

    def read(self, descriptor: int) -> None:
        """Read the available data of one pipe."""
        stream = self._streams[descriptor]
        data = stream.read()
        if not data:
            return
        self._tails[stream.rank] = (self._tails[stream.rank] + data)[-_TAIL_BYTES:]
        if stream.rank in self._shown:
            self._pass_on(stream, stream.whole_lines(data) if self._by_lines else data)
        if self._files is not None:
            self._files.write(stream.rank, data)

    def drain(self) -> None:
        """Read all remaining data; to be called after the workers have ended."""
        for descriptor, stream in self._streams.items():
            # Bounded, because a process that a worker left behind may continue to write.
            for _ in range(16):
                self.read(descriptor)
            self._pass_on(stream, stream.rest)
            stream.rest = b""

    def unseen(self, rank: int | None) -> str:
        """Return the last lines of a rank's output, empty if the terminal has shown them."""
        if rank is None or rank in self._shown:
            return ""
        return self._tails.get(rank, b"").decode(errors="replace").strip("\n")

    def close(self) -> None:
        """Close pipes and files."""
        for descriptor in self._streams:
            os.close(descriptor)
        if self._files is not None:
            self._files.close()
        self._streams, self._files = {}, None

    def _pass_on(self, stream: _Stream, data: bytes) -> None:
        if data:
            self._show(stream.rank, stream.name, data)


class _LogFiles:
    """The log files of several ranks, written by one thread.

    Args:
        folder: created if missing.
        ranks: each gets a file, to which output is appended.
        show: called with a warning if a file cannot be written.
    """

    def __init__(self, folder: Path, ranks: Sequence[int], show: Show) -> None:
        self._folder, self._show = folder, show
        self._descriptors: dict[int, int] = {}
        self._files: dict[int, LossyFile] = {}
        self._has_warned = False
        self._queue: BackgroundQueue[tuple[int, bytes]] = BackgroundQueue(
            lambda item: self._files[item[0]].write(item[1]),
            limit=_LOG_LIMIT,
            # In the first of the files that could be opened.
            loss_item=lambda size: (next(iter(self._files)), describe_loss(size, _SLOW_DISK)),
            name="log-files",
        )
        for rank in ranks:
            self._open(rank)

    def write(self, rank: int, data: bytes) -> None:
        """Append to the file of a rank, in the background."""
        if rank in self._files:
            self._queue.put((rank, data), len(data))

    def close(self) -> None:
        """Close the files, after what can be written soon."""
        if self._queue.wait(_LOG_PATIENCE_SECONDS, is_patient=True):
            for descriptor in self._descriptors.values():
                os.close(descriptor)

    def _open(self, rank: int) -> None:
        path = self._folder / output_name(rank)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            self._warn(rank, path, error)
            return
        self._descriptors[rank] = descriptor
        self._files[rank] = LossyFile(descriptor, report=lambda error: self._warn(rank, path, error))

    def _warn(self, rank: int, path: Path, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            reason = error.strerror or str(error)
            text = (
                f"warning: {path} cannot be written: {reason}; output is missing from it, training continues"
            )
            self._show(rank, "stderr", f"neox-launch: {text}\n".encode())

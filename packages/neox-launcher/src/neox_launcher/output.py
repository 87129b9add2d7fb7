"""What the workers of one host print: each rank writes into pipes, which its node reads.

A rank's output goes to the launcher's terminal, to a file, or nowhere; its last lines are always kept, for
the report should it fail.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from neox_launcher.seat import OUTPUT_STREAMS, output_pipe

__all__ = ["OutputPipes", "Show"]

Show = Callable[[int, str, bytes], None]
"""Told rank, stream and bytes of what shall be seen on the terminal."""

_CHUNK = 64 * 1024
_TAIL_BYTES = 16 * 1024


class _Stream:
    """One pipe: its reading end, and what has been read of the line that is not complete yet."""

    def __init__(self, folder: Path, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        path = output_pipe(folder, rank, name)
        os.mkfifo(path, mode=0o600)
        # Open for writing, too: so the pipe never ends while workers come and go.
        self.descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self.rest = b""

    def read(self) -> bytes:
        try:
            return os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return b""

    def whole_lines(self, data: bytes) -> bytes:
        """The lines that are complete with this; a line without an end is cut where it gets too long."""
        data = self.rest + data
        end = data.rfind(b"\n") + 1 if len(data) < _CHUNK else len(data)
        self.rest = data[end:]
        return data[:end]


class OutputPipes:
    """The pipes of all ranks of a host.

    Args:
        folder: where the pipes are made.
        ranks: that get pipes.
        shown: the ranks whose output is shown.
        by_lines: whether what is shown comes in whole lines, because those of several ranks meet.
        files: folder for the output of the other ranks; None for nowhere.
        show: is given what is shown.

    Raises:
        OSError: the files cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Sequence[int],
        *,
        shown: Sequence[int],
        by_lines: bool,
        files: Path | None,
        show: Show,
    ) -> None:
        self._streams = {
            stream.descriptor: stream
            for stream in (_Stream(folder, rank, name) for rank in ranks for name in OUTPUT_STREAMS)
        }
        self._tails = dict.fromkeys(ranks, b"")
        self._shown, self._by_lines, self._show = frozenset(shown), by_lines, show
        self._files = {rank: _open_file(files, rank) for rank in ranks if files and rank not in self._shown}

    @property
    def descriptors(self) -> list[int]:
        """What a selector shall wait for."""
        return list(self._streams)

    def read(self, descriptor: int) -> None:
        """Take over what one pipe holds."""
        stream = self._streams[descriptor]
        data = stream.read()
        if not data:
            return
        self._tails[stream.rank] = (self._tails[stream.rank] + data)[-_TAIL_BYTES:]
        if stream.rank in self._shown:
            self._pass_on(stream, stream.whole_lines(data) if self._by_lines else data)
        elif stream.rank in self._files:
            self._files[stream.rank].write(data)

    def drain(self) -> None:
        """Take over everything; for when the workers have ended."""
        for descriptor, stream in self._streams.items():
            # A process that a worker left behind may go on writing: a pipe holds at most so much.
            for _ in range(16):
                self.read(descriptor)
            self._pass_on(stream, stream.rest)
            stream.rest = b""

    def unseen(self, rank: int) -> str:
        """The last lines that a rank printed, if the terminal has not shown them."""
        if rank in self._shown:
            return ""
        return self._tails.get(rank, b"").decode(errors="replace").strip("\n")

    def close(self) -> None:
        """Close pipes and files."""
        for descriptor in self._streams:
            os.close(descriptor)
        for file in self._files.values():
            file.close()
        self._streams, self._files = {}, {}

    def _pass_on(self, stream: _Stream, data: bytes) -> None:
        if data:
            self._show(stream.rank, stream.name, data)


def _open_file(folder: Path, rank: int) -> BinaryIO:
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"rank-{rank:05d}.log").open("ab", buffering=0)

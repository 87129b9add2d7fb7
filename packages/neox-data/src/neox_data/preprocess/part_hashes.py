"""Hash the parts of corpus files and the whole files, in one pass over each."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

from neox_data.preprocess.inputs import CorpusPart

__all__ = ["PartHashes", "hashed_parts"]

_BLOCK_BYTES = 1 << 22


class PartHashes:
    """Hashes that a thread computes; see `hashed_parts`."""

    def __init__(self, parts: Sequence[CorpusPart]) -> None:
        # In order of the files; a file that is named twice is hashed twice.
        self._files: list[tuple[Future[dict[str, Any]], list[CorpusPart]]] = []
        self._parts: dict[CorpusPart, Future[str]] = {}
        for part in parts:
            if not part.first:
                self._files.append((Future(), []))
            self._files[-1][1].append(part)
            self._parts.setdefault(part, Future())

    def of_part(self, part: CorpusPart) -> str:
        """Wait for the SHA-256 of a part.

        Raises:
            OSError: its file cannot be read.
        """
        return self._parts[part].result()

    def of_files(self) -> list[dict[str, Any]]:
        """Wait for path, bytes and SHA-256 of all files, as a manifest describes them.

        Raises:
            OSError: a file cannot be read.
        """
        return [future.result() for future, _ in self._files]

    def compute(self, stopped: Event) -> None:
        """Compute all hashes, until `stopped` is set."""
        for future, parts in self._files:
            path = parts[0].path
            try:
                with path.open("rb", buffering=0) as file:
                    future.set_result(self._describe(path, file, parts, stopped))
            except OSError as error:
                future.set_exception(error)
                for part in parts:
                    if not self._parts[part].done():
                        self._parts[part].set_exception(error)
            if stopped.is_set():
                return

    def _describe(
        self, path: Path, file: BinaryIO, parts: Sequence[CorpusPart], stopped: Event
    ) -> dict[str, Any]:
        whole, num_bytes, block = hashlib.sha256(), 0, memoryview(bytearray(_BLOCK_BYTES))
        for part in parts:
            digest = hashlib.sha256()
            # A part without an end is the last one: the file may have grown.
            while limit := _BLOCK_BYTES if part.stop is None else min(_BLOCK_BYTES, part.stop - num_bytes):
                count = file.readinto(block[:limit])  # type: ignore[attr-defined]
                if not count or stopped.is_set():
                    break
                digest.update(block[:count])
                whole.update(block[:count])
                num_bytes += count
            if not self._parts[part].done():
                self._parts[part].set_result(digest.hexdigest())
        return {"path": str(path), "bytes": num_bytes, "sha256": whole.hexdigest()}


@contextmanager
def hashed_parts(parts: Sequence[CorpusPart]) -> Iterator[PartHashes]:
    """Hash parts of files, in order, in a thread while the block runs; leaving it early ends the thread."""
    stopped, hashes = Event(), PartHashes(parts)
    with ThreadPoolExecutor(1, "hash") as executor:
        executor.submit(hashes.compute, stopped)
        try:
            yield hashes
        finally:
            stopped.set()

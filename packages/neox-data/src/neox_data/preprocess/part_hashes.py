"""Hash the parts of corpus files and the whole files, in one pass over each."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

from neox_data.indexed.copy import Digest
from neox_data.preprocess.inputs import CorpusPart

__all__ = ["PartHashes", "hashed_parts"]

# Large, as a thread waits for the interpreter after each: threads that read and encode want it, too.
_BLOCK_BYTES = 1 << 22

_Described = dict[str, Any]


class PartHashes:
    """Path, bytes and SHA-256 of parts and files, as manifests describe them; see `hashed_parts`.

    Waiting for one raises OSError if its file cannot be read.

    Args:
        parts: the description of each part.
        files: the descriptions of the parts of each file, and its hash, which is complete with them.
    """

    def __init__(
        self,
        parts: Mapping[CorpusPart, Future[_Described]],
        files: Sequence[tuple[Sequence[Future[_Described]], Digest]],
    ) -> None:
        self._parts = parts
        self._files = files

    def of_part(self, part: CorpusPart) -> _Described:
        """Wait for the description of a part."""
        return self._parts[part].result()

    def of_files(self) -> list[_Described]:
        """Wait for the descriptions of all files."""
        found = []
        for futures, whole in self._files:
            parts = [future.result() for future in futures]
            num_bytes = sum(part["bytes"] for part in parts)
            found.append({"path": parts[0]["path"], "bytes": num_bytes, "sha256": whole.hexdigest()})
        return found


@contextmanager
def hashed_parts(parts: Sequence[CorpusPart]) -> Iterator[PartHashes]:
    """Hash parts of files, in order, in a thread while the block runs; leaving it early ends the thread."""
    stopped = Event()
    groups: list[list[CorpusPart]] = []
    for part in parts:
        # A file that is named twice is hashed twice.
        if not part.first or not groups or groups[-1][-1].path != part.path:
            groups.append([])
        groups[-1].append(part)
    hashed: dict[CorpusPart, Future[_Described]] = {}
    files: list[tuple[list[Future[_Described]], Digest]] = []
    with ThreadPoolExecutor(1, "hash") as executor:
        for group in groups:
            whole = hashlib.sha256()
            is_cut = len(group) > 1
            futures = [
                executor.submit(_hashed, part, [hashlib.sha256(), whole] if is_cut else [whole], stopped)
                for part in group
            ]
            hashed.update(zip(group, futures, strict=True))
            files.append((futures, whole))
        try:
            yield PartHashes(hashed, files)
        finally:
            stopped.set()
            executor.shutdown(cancel_futures=True)


def _hashed(part: CorpusPart, digests: Sequence[Digest], stopped: Event) -> _Described:
    """Add a part to digests, and return its description with the first; meaningless if it was stopped."""
    block, num_bytes = memoryview(bytearray(_BLOCK_BYTES)), 0
    with part.path.open("rb", buffering=0) as file:
        file.seek(part.first)
        # A part without an end is the last one: the file may have grown.
        while limit := _BLOCK_BYTES if part.stop is None else min(_BLOCK_BYTES, part.stop - file.tell()):
            count = file.readinto(block[:limit])
            if not count or stopped.is_set():
                break
            for digest in digests:
                digest.update(block[:count])
            num_bytes += count
    return {"path": str(part.path), "bytes": num_bytes, "sha256": digests[0].hexdigest()}

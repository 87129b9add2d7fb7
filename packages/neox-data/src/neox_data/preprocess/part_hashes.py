"""Hash the parts of corpus files and the whole files, in one pass over each."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

from neox_data.preprocess.inputs import CorpusPart

__all__ = ["PartHashes", "hashed_parts"]

# Large, as a thread waits for the interpreter after each: threads that read and encode want it, too.
_BLOCK_BYTES = 1 << 22

_Described = dict[str, Any]


class PartHashes:
    """Path, bytes and SHA-256 of parts and files, as manifests describe them; see `hashed_parts`.

    Waiting for one raises OSError if its file cannot be read.

    Args:
        files: the parts of each file, and the description of the file and of each part.
    """

    def __init__(self, files: Sequence[tuple[Sequence[CorpusPart], Future[list[_Described]]]]) -> None:
        self._files = [future for _, future in files]
        self._parts = {part: (future, n) for parts, future in files for n, part in enumerate(parts, 1)}

    def of_part(self, part: CorpusPart) -> _Described:
        """Wait for the description of a part, and so of its file."""
        future, number = self._parts[part]
        return future.result()[number]

    def of_files(self) -> list[_Described]:
        """Wait for the descriptions of all files."""
        return [future.result()[0] for future in self._files]


@contextmanager
def hashed_parts(parts: Sequence[CorpusPart]) -> Iterator[PartHashes]:
    """Hash parts of files, in order, in a thread while the block runs; leaving it early ends the thread."""
    stopped = Event()
    files: list[list[CorpusPart]] = []
    for part in parts:
        # A file that is named twice is hashed twice.
        if not part.first or not files or files[-1][-1].path != part.path:
            files.append([])
        files[-1].append(part)
    with ThreadPoolExecutor(1, "hash") as executor:
        futures = [executor.submit(_hashed, each, stopped) for each in files]
        try:
            yield PartHashes([*zip(files, futures, strict=True)])
        finally:
            stopped.set()
            executor.shutdown(cancel_futures=True)


def _hashed(parts: Sequence[CorpusPart], stopped: Event) -> list[_Described]:
    """Return the description of all parts of a file together, and of each; meaningless if it was stopped."""
    whole, block, path = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES)), parts[0].path
    described: list[_Described] = []
    with path.open("rb", buffering=0) as file:
        file.seek(parts[0].first)
        for part in parts:
            digest, num_bytes = hashlib.sha256(), 0
            # A part without an end is the last one: the file may have grown.
            while limit := _BLOCK_BYTES if part.stop is None else min(_BLOCK_BYTES, part.stop - file.tell()):
                count = file.readinto(block[:limit])
                if not count or stopped.is_set():
                    break
                digest.update(block[:count])
                if len(parts) > 1:
                    whole.update(block[:count])
                num_bytes += count
            described.append({"path": str(path), "bytes": num_bytes, "sha256": digest.hexdigest()})
    if len(parts) == 1:
        return described * 2
    num_bytes = sum(each["bytes"] for each in described)
    return [{"path": str(path), "bytes": num_bytes, "sha256": whole.hexdigest()}, *described]

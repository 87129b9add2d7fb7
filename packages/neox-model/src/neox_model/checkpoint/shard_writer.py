"""The program of the shard writer: writes a shard from shared memory to disk. Imports no torch.

    python -P -m neox_model.checkpoint.shard_writer PATH SNAPSHOT REQUEST ANSWER

The last three are numbers of open files in memory, which both processes share: the bytes of the shard; the
request, as JSON; and the answer, which begins with the number of bytes written so far and ends with JSON.
The process ends when the worker that started it ends, which also sets its priority.
"""

import json
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from neox_config.atomic import flush_file
from neox_launcher.worker.reporting import die_with_parent
from neox_model.checkpoint.checksums import Checksums

__all__ = ["ANSWER_OFFSET", "CHECKSUMS", "ERROR", "PARENT", "SIZE", "SPANS", "main", "read_progress"]

PARENT, SIZE, SPANS = "parent", "size", "spans"
"""Fields of the request: process id of the worker, bytes of the shard, first and last byte of each piece."""
CHECKSUMS, ERROR = "checksums", "error"
"""Fields of the answer: one of the two."""
ANSWER_OFFSET = 8
"""First byte of the answer's JSON; before it is the number of bytes written, little-endian."""
# Written and flushed at once, so that a slow disk shows progress and never has to take a whole shard.
_CHUNK_BYTES = 2**26


def main(arguments: Sequence[str]) -> int:
    """Write the shard, and answer with its checksums or with the error; return the exit code."""
    path, (snapshot, request, answer) = Path(arguments[0]), map(int, arguments[1:])
    asked = json.loads(os.pread(request, os.fstat(request).st_size, 0))
    die_with_parent(asked[PARENT])

    def report(written: int) -> None:
        os.pwrite(answer, written.to_bytes(ANSWER_OFFSET, "little"), 0)

    try:
        result: dict[str, Any] = {CHECKSUMS: _write(path, snapshot, asked[SIZE], asked[SPANS], report)}
    except OSError as error:
        result = {ERROR: str(error)}
    os.pwrite(answer, json.dumps(result, allow_nan=False).encode(), ANSWER_OFFSET)
    return int(ERROR in result)


def read_progress(answer: int) -> int:
    """Return the number of bytes that the shard writer has written so far."""
    return int.from_bytes(os.pread(answer, ANSWER_OFFSET, 0), "little")


def _write(
    path: Path, snapshot: int, size: int, spans: Sequence[Sequence[int]], report: Callable[[int], None]
) -> list[int]:
    """Write the first bytes of the snapshot into a new file, and flush it to disk.

    Args:
        path: the new file.
        snapshot: number of the open file with the bytes.
        size: number of bytes.
        spans: first byte of each piece, and the one after its last.
        report: called with the number of bytes written so far.

    Returns:
        The checksums of the pieces.

    Raises:
        OSError: the disk is full or the file cannot be written.
    """
    content = memoryview(mmap.mmap(snapshot, size, prot=mmap.PROT_READ))
    with Checksums() as checksums, path.open("xb") as file:
        waiting = deque(spans)
        for start in range(0, size, _CHUNK_BYTES):
            stop = min(start + _CHUNK_BYTES, size)
            file.write(content[start:stop])
            flush_file(file)
            report(stop)
            # Computed while the next chunk is written, and never for long without progress.
            while waiting and waiting[0][1] <= stop:
                first, end = waiting.popleft()
                checksums.add(content[first:end])
        return checksums.results()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

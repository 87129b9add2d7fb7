"""Write texts to one file of JSON lines, in an order in which every part is a fair sample."""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from neox_data.errors import CorpusError
from neox_data.preprocess.texts import cut_text
from neox_data.whole_files import naming_when_full, written_aside

__all__ = ["CorpusCounts", "write_corpus"]

# A document is at most this fraction of a corpus, so that the parts of a split can have the sizes of their
# shares, but may always have this number of bytes.
_LARGEST_SHARE = 100
_NEVER_CUT_BYTES = 2048


@dataclass(frozen=True, slots=True)
class CorpusCounts:
    """Counts of a corpus.

    Attributes:
        documents: documents that were read.
        written: documents that were written; more than were read if some were cut.
        cut: documents that were cut.
        num_bytes: size of the texts in UTF-8.
    """

    documents: int
    written: int
    cut: int
    num_bytes: int


class _Lines:
    """Lines in a file, with the place and size of each."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._places, self._sizes = file, array("q"), array("q")
        self.num_bytes = 0
        self.longest = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, text: str) -> None:
        line = json.dumps({"text": text}, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        self._places.append(self._file.tell())
        self._sizes.append(len(line))
        self._file.write(line)
        size = len(text.encode())
        self.num_bytes += size
        self.longest = max(self.longest, size)

    def read(self, order: Iterable[int] | None = None) -> Iterator[bytes]:
        self._file.flush()
        for number in range(len(self)) if order is None else order:
            self._file.seek(self._places[number])
            yield self._file.read(self._sizes[number])


def write_corpus(texts: Iterable[str], output: Path, *, remedy: Callable[[], str]) -> CorpusCounts:
    """Write one JSON line per document, `{"text": ...}`, in a fixed pseudo-random order.

    Documents that are larger than a hundredth of all texts are cut at line ends, or else at spaces. Two
    temporary files next to the output need as much space as it.

    Args:
        texts: the texts.
        output: the file.
        remedy: returns what to do if there are no texts, for the error.

    Raises:
        CorpusError: there are no texts.
        OSError: the file cannot be written, or the disk is full; it names the file.
    """
    unsorted, pieces = (output.with_name(f".{output.name}.{name}") for name in ("unsorted", "cut"))
    try:
        with (
            naming_when_full(output, unsorted, pieces),
            unsorted.open("w+b") as file,
            pieces.open("w+b") as other,
        ):
            read = _Lines(file)
            for text in texts:
                read.add(text)
            if not len(read):
                raise CorpusError(f"none of the files contains text; {remedy()}")
            written, cut = _cut(read, _Lines(other))
            with written_aside(output) as result:
                # A pseudo-random order, the same on every machine.
                digests = (
                    hashlib.blake2b(str(number).encode(), digest_size=8).digest()
                    for number in range(len(written))
                )
                keys = np.fromiter((int.from_bytes(each) for each in digests), np.uint64, len(written))
                for line in written.read(np.argsort(keys, kind="stable").tolist()):
                    result.write(line)
    finally:
        unsorted.unlink(missing_ok=True)
        pieces.unlink(missing_ok=True)
    return CorpusCounts(len(read), len(written), cut, written.num_bytes)


def _cut(read: _Lines, pieces: _Lines) -> tuple[_Lines, int]:
    """Return the lines without documents that are too large, and how many were cut."""
    largest = max(_NEVER_CUT_BYTES, read.num_bytes // _LARGEST_SHARE)
    if read.longest <= largest:
        return read, 0
    cut = 0
    for line in read.read():
        parts = [part for part in cut_text(json.loads(line)["text"], largest) if part.strip()]
        cut += len(parts) > 1
        for part in parts:
            pieces.add(part)
    return pieces, cut

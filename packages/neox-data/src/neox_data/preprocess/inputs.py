"""Which files a corpus is, and stretches of them."""

import os
from collections.abc import Iterable, Iterator
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple

from neox_data.errors import CorpusError

__all__ = [
    "ARCHIVE",
    "LINES",
    "RECORDS",
    "TABLES",
    "TEXTS",
    "CorpusPart",
    "cut_file",
    "ending_of",
    "find_inputs",
]

LINES = (".jsonl", ".json")
WHOLE = (".txt",)
RECORDS = (".dat",)
TABLES = (".parquet",)
ARCHIVE = ".tar"
TEXTS = (*LINES, *WHOLE, *RECORDS)
_PACKED = (".gz", ".zst")
_READABLE = (*TEXTS, *TABLES, ARCHIVE)
_BUFFER_BYTES = 1 << 20


class CorpusPart(NamedTuple):
    """A stretch of a corpus file that begins and ends between two lines; the whole file unless told.

    Attributes:
        path: the file.
        first: byte at which the stretch begins.
        stop: byte at which it ends; None: the end of the file.
    """

    path: Path
    first: int = 0
    stop: int | None = None

    @property
    def num_bytes(self) -> int:
        """Its size as it lies on the disk."""
        return (self.path.stat().st_size if self.stop is None else self.stop) - self.first

    def __str__(self) -> str:
        return f"{self.path} (from byte {self.first:,} on)" if self.first else str(self.path)


def cut_file(path: Path, part_bytes: int) -> Iterator[CorpusPart]:
    """A file in stretches of about so many bytes, where it consists of lines that lie there unpacked."""
    size = path.stat().st_size
    if path.suffix not in LINES or size <= part_bytes:
        yield CorpusPart(path)
        return
    first = 0
    with path.open("rb") as file:
        while size - first > part_bytes:
            file.seek(first + part_bytes)
            while (line := file.readline(_BUFFER_BYTES)) and not line.endswith(b"\n"):
                pass
            if file.tell() >= size:
                break
            yield CorpusPart(path, first, file.tell())
            first = file.tell()
    yield CorpusPart(path, first)


def find_inputs(names: Iterable[str]) -> list[Path]:
    """The files that names mean: paths, folders, patterns (`data/*.jsonl`), or several between commas.

    Of a folder, all files below it that can be read, sorted by name; links to other folders are not followed.

    Raises:
        CorpusError: a name means no file, or one of a kind that is not read.
    """
    paths = [path for name in names for path in _paths_of(name)]
    for path in paths:
        _check_readable(path)
    return paths


def _paths_of(name: str) -> Iterator[Path]:
    if not name.strip():
        raise CorpusError("a name of an input is empty; give a file, a folder or a pattern")
    if Path(name).is_file():
        yield Path(name)
    elif Path(name).is_dir():
        yield from _files_below(Path(name))
    elif "," in name:
        for part in filter(None, (part.strip() for part in name.split(","))):
            yield from _paths_of(part)
    elif has_magic(name):
        matches = sorted(match for match in glob(name, recursive=True) if Path(match).is_file())
        if not matches:
            raise CorpusError(f"no file matches {name!r}; correct the pattern")
        yield from map(Path, matches)
    else:
        raise CorpusError(f"{name} does not exist; correct the path")


def _files_below(folder: Path) -> Iterator[Path]:
    names = (Path(place, name) for place, _, files in os.walk(folder) for name in files)
    paths = sorted(path for path in names if ending_of(path) in _READABLE)
    if not paths:
        raise CorpusError(f"{folder} holds no file that ends in {', '.join(_READABLE)}; name another folder")
    yield from paths


def ending_of(path: Path) -> str:
    """The ending that says how to read a file, without one that says how it is compressed."""
    return path.with_suffix("").suffix if path.suffix in _PACKED else path.suffix


def _check_readable(path: Path) -> None:
    if ending_of(path) not in _READABLE:
        raise CorpusError(
            f"{path} has an ending that is not read; give files that end in {', '.join(_READABLE)}, "
            f"or these and {' or '.join(_PACKED)}"
        )

"""Which files a corpus is, and stretches of them."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple, NoReturn

from neox_data.errors import CorpusError
from neox_data.preprocess.json_array import begins_array
from neox_data.preprocess.passed_over import PassedOver

__all__ = [
    "ENDINGS",
    "RECORD",
    "RESULT",
    "CorpusPart",
    "FileFormat",
    "cut_file",
    "find_inputs",
    "format_of",
    "is_result",
    "refuse_result",
]

RECORD = "corpus.json"
"""Name of the file in which `neox-data prepare` names the texts of a result; its folder is not read."""
RESULT = "the result of an earlier prepare or init"

# Suffixes of the formats of documents and archives, and of compression.
_DOCUMENTS = (".jsonl", ".json", ".txt", ".md", ".markdown", ".dat")
_OTHER_NAMES = {".md": ".txt", ".markdown": ".txt"}
_TABLES = (".parquet",)
_ARCHIVES = (".tar", ".zip")
_PACKED = (".gz", ".zst", ".bz2", ".xz")
# Formats whose end must be read first, which a compressed file does not allow.
_NEVER_PACKED = (".parquet", ".zip")
_READABLE = (*_DOCUMENTS, *_TABLES, *_ARCHIVES)
ENDINGS = f"{', '.join(_READABLE)}, optionally followed by {', '.join(_PACKED[:-1])} or {_PACKED[-1]}"
"""The endings of files that are read, for messages."""
_BUFFER_BYTES = 1 << 20
_LARGEST_RECORD = 1 << 20


class FileFormat(NamedTuple):
    """The format of a file, by its name.

    Attributes:
        kind: suffix of the format of the content, such as ".jsonl"; ".txt" also of Markdown; ".txt.gz",
            because lm_dataformat reads a document per line from it; "": not readable.
        packing: suffix of the compression; "": none.
    """

    kind: str
    packing: str


def format_of(path: Path) -> FileFormat:
    """Return the format of a file by its name, in upper or lower case."""
    path = Path(path.name.lower())
    name = path.name
    if name.endswith(".tgz"):
        return FileFormat(".tar", ".gz")
    # The parts of OpenWebText in lm_dataformat.
    if name.endswith("_data.xz"):
        return FileFormat(".tar", ".xz")
    if name.endswith(".txt.gz"):
        return FileFormat(".txt.gz", ".gz")
    packing = path.suffix if path.suffix in _PACKED else ""
    kind = path.with_suffix("").suffix if packing else path.suffix
    is_readable = kind in _READABLE and not (packing and kind in _NEVER_PACKED)
    return FileFormat(_OTHER_NAMES.get(kind, kind) if is_readable else "", packing)


class CorpusPart(NamedTuple):
    """A range of whole lines of a corpus file; by default the whole file.

    Attributes:
        path: the file.
        first: first byte of the range.
        stop: end of the range; None: the end of the file.
    """

    path: Path
    first: int = 0
    stop: int | None = None

    @property
    def num_bytes(self) -> int:
        """Return its size on disk in bytes."""
        return (self.path.stat().st_size if self.stop is None else self.stop) - self.first

    def __str__(self) -> str:
        return f"{self.path} (from byte {self.first:,} on)" if self.first else str(self.path)


def cut_file(path: Path, part_bytes: int) -> Iterator[CorpusPart]:
    """Split a file of uncompressed lines into parts of about `part_bytes`; yield other files whole."""
    size = path.stat().st_size
    if size <= part_bytes or path.suffix.lower() not in (".jsonl", ".json"):
        yield CorpusPart(path)
        return
    first = 0
    with path.open("rb") as file:
        if path.suffix.lower() == ".json" and begins_array(file):
            yield CorpusPart(path)
            return
        while size - first > part_bytes:
            file.seek(first + part_bytes)
            while (line := file.readline(_BUFFER_BYTES)) and not line.endswith(b"\n"):
                pass
            if file.tell() >= size:
                break
            yield CorpusPart(path, first, file.tell())
            first = file.tell()
    yield CorpusPart(path, first)


def find_inputs(names: Iterable[str], passed_over: PassedOver | None = None) -> list[Path]:
    """Return the files of names: paths, folders, patterns (`data/*.jsonl`) or comma-separated lists.

    A folder yields all supported files below it, sorted by name; links to other folders are not followed, and
    results of `neox-data prepare` are not read.

    Args:
        names: the names.
        passed_over: where the other files of folders are recorded.

    Raises:
        CorpusError: a name matches no file, a broken link, a file of an unsupported type, or a result.
        OSError: a folder cannot be read.
    """
    found = passed_over if passed_over is not None else PassedOver()
    paths = [path for name in names for path in _paths_of(name, found)]
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise CorpusError(f"{path} is a link that leads to no file; restore the file, or remove the link")
        if not path.is_file():
            raise CorpusError(f"{path} is not a regular file; write its content to a file, and pass that")
        if not format_of(path).kind:
            raise CorpusError(
                f"{path} has an unsupported ending; pass files that end in {ENDINGS}",
                code="unsupported-ending",
            )
    return paths


def _paths_of(name: str, passed_over: PassedOver) -> Iterator[Path]:
    if not name.strip():
        raise CorpusError("--input contains an empty name; pass a file, a folder or a pattern")
    # Functions of os.path, because a list of names may be longer than a path may be.
    if os.path.isdir(name):
        yield from _files_below(Path(name), passed_over)
    elif os.path.lexists(name):
        yield Path(name)
    elif "," in name:
        for part in filter(None, (part.strip() for part in name.split(","))):
            yield from _paths_of(part, passed_over)
    elif has_magic(name):
        yield from _matches(name, passed_over)
    else:
        # Of other errors, such as a folder without permission, `lexists` says that there is nothing.
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(name)
        raise CorpusError(f"{name} does not exist; correct the path")


def _matches(pattern: str, passed_over: PassedOver) -> Iterator[Path]:
    matches = [Path(match) for match in sorted(glob(pattern, recursive=True))]
    if "**" in pattern:
        # It matches the files below the folders, and below links to folders, which may form a loop.
        files = {os.path.realpath(path): path for path in reversed(matches) if not path.is_dir()}
        wanted = [Path(name) for name in sorted(map(str, files.values()))]
    else:
        wanted = matches
    if not wanted:
        raise CorpusError(f"no file matches {pattern!r}; correct the pattern")
    for path in wanted:
        if path.is_dir():
            yield from _files_below(path, passed_over)
        else:
            yield path


def is_result(folder: Path) -> bool:
    """Return whether a folder is a result: its corpus, logs and tokenizer would be read as texts."""
    record = folder / RECORD
    try:
        if record.stat().st_size > _LARGEST_RECORD:
            return False
        known = json.loads(record.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(known, dict) and "identity" in known and "written" in known


def refuse_result(folder: Path) -> None:
    """Refuse a folder that a user names and that is a result.

    Raises:
        CorpusError: it is one.
    """
    if is_result(folder):
        raise CorpusError(f"{folder} is {RESULT}, not a folder of texts; give the folder of these")


def _files_below(folder: Path, passed_over: PassedOver) -> Iterator[Path]:
    refuse_result(folder)
    paths = []
    for place, folders, files in os.walk(folder, onerror=_raise):
        paths += [Path(place, name) for name in files]
        for path in [Path(place, name) for name in sorted(folders)]:
            if path.is_symlink():
                passed_over.add(f"{path}, a link to a folder")
            elif is_result(path):
                passed_over.add(f"{path}, {RESULT}")
                folders.remove(path.name)
    readable = [path for path in sorted(paths) if format_of(path).kind]
    for path in sorted(set(paths) - set(readable)):
        passed_over.add(str(path))
    if not readable:
        raise CorpusError(f"{folder} contains no file that ends in {ENDINGS}; pass another folder")
    yield from readable


def _raise(error: OSError) -> NoReturn:
    raise error

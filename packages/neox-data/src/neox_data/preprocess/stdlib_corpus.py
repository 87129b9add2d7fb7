"""Build a corpus from the source files of the running Python's standard library.

Test folders are excluded: they are more than half of the library, contain generated tables, and some
distributions do not install them. About 12 MB remain.

Files are ordered by a hash of their names, so that each part of a split is a representative sample, and the
same one on every machine.
"""

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from neox_data.errors import CorpusError
from neox_data.whole_files import written_aside

__all__ = ["CorpusCounts", "write_stdlib_corpus"]

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, slots=True)
class CorpusCounts:
    """Counts of a corpus.

    Attributes:
        files: number of files included.
        undecodable: number of files excluded because they are not UTF-8.
        num_bytes: size of the texts.
    """

    files: int
    undecodable: int
    num_bytes: int


def write_stdlib_corpus(output: Path, *, root: Path | None = None) -> CorpusCounts:
    """Write one JSON line per source file, `{"text": ..., "path": ...}`, in a fixed pseudo-random order.

    Args:
        output: the `.jsonl` file, written atomically.
        root: folder to read; None: the standard library.

    Raises:
        CorpusError: there are no source files (for example, if the library is in a zip archive).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = undecodable = num_bytes = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(output) as lines:
        for name in sorted(_source_names(root), key=_place):
            data = (root / name).read_bytes()
            try:
                text = data.decode()
            except UnicodeDecodeError:
                undecodable += 1
                continue
            line = json.dumps({"text": text, "path": name}, ensure_ascii=False, allow_nan=False)
            lines.write(line.encode() + b"\n")
            files, num_bytes = files + 1, num_bytes + len(data)
        if not files:
            raise CorpusError(
                f"{root} contains no Python source files; use a Python whose library is not in an archive"
            )
    return CorpusCounts(files, undecodable, num_bytes)


def _source_names(root: Path) -> Iterator[str]:
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not _LEFT_OUT.intersection(name.parts) and path.is_file():
            yield name.as_posix()


def _place(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()

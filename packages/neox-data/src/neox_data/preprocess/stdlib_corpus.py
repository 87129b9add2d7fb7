"""Build a corpus from source files of the running Python's standard library.

`stdlib_files.txt` lists the files: those that Python 3.11, 3.12 and 3.13 have in common, also in Debian's
packages, so that the corpora of different versions differ only in the contents of the files. Left out are
tests, and generated tables such as those of character encodings. The order is that of the SHA-256 of the
names, so that each part of a split is a representative sample, and the same one on every machine.
"""

import hashlib
import json
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from neox_data.errors import CorpusError
from neox_data.whole_files import written_aside

__all__ = ["CorpusCounts", "listed_files", "write_stdlib_corpus"]


@dataclass(frozen=True, slots=True)
class CorpusCounts:
    """Counts of a corpus.

    Attributes:
        files: number of files included.
        missing: names of listed files that this Python does not have.
        num_bytes: size of the texts.
        sha256: of the corpus file; equal if the corpora are.
    """

    files: int
    missing: tuple[str, ...]
    num_bytes: int
    sha256: str


def listed_files() -> list[str]:
    """Return the names of the files of the corpus, in their order."""
    return (files("neox_data.preprocess") / "stdlib_files.txt").read_text().splitlines()


def write_stdlib_corpus(
    output: Path, *, root: Path | None = None, names: Sequence[str] | None = None
) -> CorpusCounts:
    """Write one JSON line per source file, `{"text": ..., "path": ...}`.

    Args:
        output: the `.jsonl` file, written atomically.
        root: folder to read; None: the standard library.
        names: files in the folder, in the order of the lines; None: `listed_files()`.

    Raises:
        CorpusError: none of the files exists, for example, if the library is in a zip archive.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    names = listed_files() if names is None else names
    found = [name for name in names if (root / name).is_file()]
    if not found:
        raise CorpusError(
            f"{root} contains no Python source files; use a Python whose library is not in an archive",
            code="no-sources",
        )
    digest, num_bytes = hashlib.sha256(), 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(output) as lines:
        for name in found:
            data = (root / name).read_bytes()
            document = {"text": data.decode(), "path": name}
            line = json.dumps(document, ensure_ascii=False, allow_nan=False).encode() + b"\n"
            lines.write(line)
            digest.update(line)
            num_bytes += len(data)
    missing = tuple(sorted(set(names) - set(found)))
    return CorpusCounts(len(found), missing, num_bytes, digest.hexdigest())

"""Find files with texts, and read them; everything that is left out is counted with its reason."""

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from neox_data.errors import CorpusError
from neox_data.pluralize import first_few
from neox_data.preprocess.inputs import ENDINGS, RESULT, format_of, is_result, refuse_result
from neox_data.preprocess.passed_over import PassedOver
from neox_data.preprocess.read import CorpusReader

__all__ = ["Skips", "find_texts", "texts_of"]

_MOST_NAMED = 3
_EMPTY = "the file is empty"
_UNREADABLE_FILES = "files that cannot be read as text"
_UNREADABLE_PARTS = "lines or other parts of files that cannot be read as text"


@dataclass(slots=True)
class Skips:
    """Files and documents that were left out.

    Args:
        counts: their number by reason.
        first: the first few names by reason.
    """

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: object, count: int = 1) -> None:
        """Record a file, or documents of a file."""
        self.counts[reason] = self.counts.get(reason, 0) + count
        names = self.first.setdefault(reason, [])
        if len(names) < _MOST_NAMED:
            names.append(str(name))

    def lines(self) -> Iterator[str]:
        """Yield a line for each reason."""
        for reason, count in self.counts.items():
            named = self.first[reason]
            yield f"skipped {count:,}: {reason}: {first_few(named, _MOST_NAMED, number=count)}"

    def indented(self) -> str:
        """Return these lines for the end of a message; empty if nothing was left out."""
        return "".join(f"\n  {line}" for line in self.lines())


def find_texts(names: Iterable[Path], skips: Skips, *, without: Path) -> list[Path]:
    """Return the files with texts: the given ones, and those below the given folders, sorted by name.

    Links to folders are not followed, hidden files and folders and results are not read, and a file is read
    once.

    Args:
        names: files and folders.
        skips: where other files are recorded.
        without: folder that is not searched.

    Raises:
        CorpusError: a name does not exist, a given file cannot be read, a given folder is a result or the
            one that is not searched, or there is no file with texts.
    """
    found: dict[tuple[int, int], Path] = {}
    names = list(names)
    for name in names:
        if name.is_dir() and name.resolve() == without.resolve():
            raise CorpusError(
                f"{name} is the folder of the texts and also that of the result; give another --output, "
                f"such as {name / 'run'}"
            )
        if name.is_dir():
            refuse_result(name)
        if not name.is_dir() and (reason := _why_not_read(name)):
            remedy = "" if reason == _EMPTY else f"; pass a folder, or a file of a supported type: {ENDINGS}"
            raise CorpusError(f"{name}: {reason}{remedy}")
        for path in _files_below(name, skips, without.resolve()) if name.is_dir() else [name]:
            status = path.stat()
            first = found.setdefault((status.st_dev, status.st_ino), path)
            if first is not path:
                skips.add("the same file as another one", path)
    if not found:
        raise CorpusError(
            f"{', '.join(map(str, names))} has no file with text; pass a folder with files of a supported "
            f"type: {ENDINGS}{skips.indented()}"
        )
    return list(found.values())


def _files_below(folder: Path, skips: Skips, without: Path) -> Iterator[Path]:
    def report(error: OSError) -> None:
        skips.add(f"cannot be read ({error.strerror})", error.filename)

    for place, folders, files in os.walk(folder, onerror=report):
        kept = []
        for name in sorted(folders):
            path = Path(place, name)
            if path.is_symlink():
                skips.add("a link to a folder", path)
            elif name.startswith("."):
                skips.add("hidden", path)
            elif path.resolve() == without:
                continue
            elif is_result(path):
                skips.add(RESULT, path)
            else:
                kept.append(name)
        folders[:] = kept
        for name in sorted(files):
            path = Path(place, name)
            if reason := "hidden" if name.startswith(".") else _why_not_read(path):
                skips.add(reason, path)
            else:
                yield path


def _why_not_read(path: Path) -> str:
    """Return why a file is not read; empty if it is."""
    try:
        status = path.stat()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if not format_of(path).kind:
        return "the file type is not supported"
    if not os.access(path, os.R_OK):
        return "cannot be read (Permission denied)"
    return "" if status.st_size else _EMPTY


def texts_of(path: Path, key: str, skips: Skips) -> Iterator[str]:
    """Yield the texts of a file, without those that are blank or binary.

    Args:
        path: the file.
        key: key of the text in JSON lines and tables.
        skips: where documents that are left out are recorded.

    Raises:
        CorpusError: an archive or a table is damaged.
    """
    members = PassedOver()
    reader = CorpusReader([path], (key,), skip_bad_lines=True, split_long=True, passed_over=members)
    for number, document in enumerate(reader, 1):
        text = document.texts[0]
        if "\0" in text:
            skips.add("binary", f"{path}, document {number:,}")
        elif not text.strip():
            skips.add("blank", f"{path}, document {number:,}")
        else:
            yield text
    if reader.num_skipped:
        is_whole = format_of(path).kind == ".txt"
        reason = _UNREADABLE_FILES if is_whole else _UNREADABLE_PARTS
        skips.add(reason, reader.first_skipped[0], reader.num_skipped)
    if members.count:
        skips.add("members of archives whose file type is not supported", members.first[0], members.count)

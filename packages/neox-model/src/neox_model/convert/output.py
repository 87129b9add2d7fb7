"""Write a folder aside and rename it when it is complete."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neox_config.atomic import flush_folder
from neox_model.convert.errors import ConversionError, UnwrittenError

__all__ = ["folder_written_aside", "refuse_existing"]


def refuse_existing(path: Path) -> None:
    """Raise an error if a folder to write already contains something.

    Raises:
        ConversionError: it does, or its parent cannot be written.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConversionError(f"{path} already exists; pass another --output, or remove it first")
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConversionError(f"cannot write {path}: no write permission for {parent}; pass another --output")


@contextmanager
def folder_written_aside(path: Path) -> Iterator[Path]:
    """Provide a hidden folder that is renamed to `path` after the block.

    If the block raises, the hidden folder is removed. One that a killed process left behind is removed by the
    next conversion to the same path.

    Args:
        path: a folder that does not exist, or is empty.

    Raises:
        ConversionError: it is not.
        UnwrittenError: the disk is full, or the folder cannot be written.
    """
    refuse_existing(path)
    path = path.resolve()  # "." has no name, and a folder cannot replace a link.
    aside = path.with_name(f".{path.name}.{os.getpid()}.converting")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pattern = re.compile(re.escape(f".{path.name}.") + r"(\d+)\.converting")
        for other in path.parent.iterdir():
            found = pattern.fullmatch(other.name)
            if found is not None and not Path(f"/proc/{found[1]}").exists():
                shutil.rmtree(other)
        aside.mkdir()
        try:
            yield aside
            for each in (aside, *aside.rglob("*")):
                flush_folder(each)  # Files too: a power failure must not leave empty ones under the name.
            aside.rename(path)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        flush_folder(path.parent)
    except OSError as error:
        raise UnwrittenError(
            f"cannot write {path}: {error}; free space, make the files readable, or pass another --output"
        ) from error

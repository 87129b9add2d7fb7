"""The folder that holds checkpoints: their names, `latest`, and how one appears and disappears whole.

A checkpoint is written into a hidden folder beside its final place and renamed when complete, so a folder
called `global_stepN` is always complete; `latest` is replaced by a rename too, and deleting begins with one.
Only the training run that saves tidies up leftovers; readers never write.
"""

import logging
import os
import re
import shutil
from pathlib import Path

from neox_model.checkpoint.contents import MANIFEST
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.shards import write_durably

__all__ = [
    "LATEST",
    "abandon",
    "begin",
    "checkpoint_name",
    "complete_checkpoints",
    "find_latest",
    "keep_newest",
    "offer_earlier",
    "publish",
    "unfinished",
]

LATEST = "latest"

_NAME = re.compile(r"global_step(\d+)")
_LEFTOVER = re.compile(r"\.(global_step\d+)\.(saving|replaced|deleted)")

logger = logging.getLogger(__name__)


def checkpoint_name(iteration: int) -> str:
    """Folder name of the checkpoint after `iteration` updates."""
    return f"global_step{iteration}"


def complete_checkpoints(directory: Path) -> list[Path]:
    """Folders of the complete checkpoints, oldest iteration first."""
    if not directory.is_dir():
        return []
    found = [
        path for path in directory.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()
    ]
    return sorted(found, key=_iteration)


def find_latest(directory: Path) -> Path | None:
    """The folder of the checkpoint that `latest` names, or None when there is no checkpoint.

    Raises:
        CheckpointError: `latest` cannot be read or names a folder that is not there.
    """
    file = directory / LATEST
    try:
        name = file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return _newest_without_latest(directory)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}{offer_earlier(directory, None)}") from error
    # The folder a new one of the same name was about to replace, if the machine stopped just then.
    for folder in (directory / name, directory / f".{name}.replaced"):
        if _NAME.fullmatch(name) and (folder / MANIFEST).is_file():
            return folder
    raise CheckpointError(
        f"{file} names {name!r}, which is no checkpoint here{offer_earlier(directory, None)}"
    )


def _newest_without_latest(directory: Path) -> Path | None:
    others = complete_checkpoints(directory)
    if not others:
        return None
    logger.warning("%s has no file %r: using its newest checkpoint, %s", directory, LATEST, others[-1].name)
    return others[-1]


def offer_earlier(directory: Path, damaged: Path | None) -> str:
    """The end of an error message: how to go on from the newest complete checkpoint before `damaged`."""
    others = [
        path
        for path in complete_checkpoints(directory)
        if damaged is None or _iteration(path) < _iteration(damaged)
    ]
    if not others:
        return "; there is no earlier complete checkpoint in this folder"
    name = others[-1].name
    return f"; to go on from the complete checkpoint {name}, run: echo {name} > {directory / LATEST}"


def unfinished(final: Path) -> Path:
    """The hidden folder in which a checkpoint is written before it gets its name."""
    return final.with_name(f".{final.name}.saving")


def begin(temporary: Path) -> None:
    """Make the hidden folder for a new checkpoint, after removing what earlier runs left behind."""
    temporary.parent.mkdir(parents=True, exist_ok=True)
    _tidy(temporary.parent)
    temporary.mkdir()


def abandon(temporary: Path) -> None:
    """Remove an unfinished checkpoint, giving its space back."""
    shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, final: Path) -> None:
    """Give a finished checkpoint its name and point `latest` at it."""
    directory = final.parent
    replaced = final.with_name(f".{final.name}.replaced")
    _flush_folder(temporary)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    _flush_folder(directory)
    _point_latest(directory, final.name)
    if replaced.exists():
        shutil.rmtree(replaced)


def keep_newest(directory: Path, count: int, iteration: int) -> None:
    """Delete all but the newest `count` of the checkpoints up to `iteration`."""
    past = [path for path in complete_checkpoints(directory) if _iteration(path) <= iteration]
    for path in past[: max(0, len(past) - count)]:
        hidden = directory / f".{path.name}.deleted"
        path.rename(hidden)
        shutil.rmtree(hidden)
        logger.info("deleted checkpoint %s", path)


def _iteration(path: Path) -> int:
    return int(path.name.removeprefix("global_step"))


def _point_latest(directory: Path, name: str) -> None:
    aside = directory / f".{LATEST}.saving"
    aside.unlink(missing_ok=True)
    write_durably(aside, name + "\n")
    aside.rename(directory / LATEST)
    _flush_folder(directory)


def _tidy(directory: Path) -> None:
    for path in directory.iterdir():
        leftover = _LEFTOVER.fullmatch(path.name)
        if leftover is None:
            continue
        final = directory / leftover[1]
        if leftover[2] == "replaced" and not final.exists():
            path.rename(final)
        else:
            shutil.rmtree(path)
            logger.info("removed the unfinished %s", path)


def _flush_folder(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

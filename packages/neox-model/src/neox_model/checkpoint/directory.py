"""The folder of checkpoints: their names, the file `latest`, and atomic creation and deletion.

A checkpoint is written into a hidden folder next to its final place and renamed when complete, so a folder
named `global_stepN` is always complete. `latest` is replaced by a rename too, and deletion starts with a
rename. Only the training run that saves removes leftovers; readers never write.

After the rename a checkpoint is saved. What cannot be deleted, before or after, is a warning, and has a name
that no later save needs. What has the name of a checkpoint but is none is moved away, never deleted.
"""

import logging
import os
import re
import shlex
import shutil
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path

from neox_config.atomic import atomic_write, flush_folder
from neox_config.facts.checkpoints import (
    LATEST,
    MANIFEST,
    complete_checkpoints,
    gpt_neox_checkpoint,
    is_checkpoint,
    iteration_of,
)
from neox_model.checkpoint.errors import CheckpointError, quoted

__all__ = [
    "abandon",
    "announce",
    "begin",
    "final_name",
    "find_latest",
    "keep_newest",
    "marks_of_uploads",
    "offer_earlier",
    "place",
    "point_latest",
    "publish",
    "refuse_gpt_neox",
    "restore",
    "unfinished",
    "upload_mark",
    "withdraw",
]

_LEFTOVER = re.compile(r"\.(\w+)(?:\.\d+)?\.(saving|replaced|deleted)")

logger = logging.getLogger(__name__)


def find_latest(directory: Path) -> Path | None:
    """Return the folder of the checkpoint that `latest` names, None if there is no checkpoint.

    Without `latest`, it is `directory` itself if that is one checkpoint.

    Raises:
        CheckpointError: `latest` cannot be read or names a folder that does not exist, or the folder has only
            checkpoints of GPT-NeoX.
    """
    file = directory / LATEST
    try:
        name = file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return directory if is_checkpoint(directory) else _newest_without_latest(directory)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {file}: {error}{offer_earlier(directory, None)}") from error
    # `.replaced`: the old folder, if the machine stopped while a new one of the same name was replacing it.
    if iteration_of(name) is not None:
        for folder in (directory / name, directory / f".{name}.replaced"):
            if (folder / MANIFEST).is_file():
                return folder
        refuse_gpt_neox(directory / name)
    raise CheckpointError(
        f"{file} names {quoted(name)!r}, which is not a checkpoint in this folder"
        f"{offer_earlier(directory, None)}",
        code="no-such-checkpoint",
    )


def _newest_without_latest(directory: Path) -> Path | None:
    others = complete_checkpoints(directory)
    if not others:
        refuse_gpt_neox(directory)
        return None
    logger.warning(
        "%s has no file %r: using the checkpoint of the highest iteration, %s",
        directory,
        LATEST,
        others[-1].name,
    )
    return others[-1]


def refuse_gpt_neox(directory: Path) -> None:
    """Raise an error if a folder is or has one of GPT-NeoX's checkpoints."""
    found = gpt_neox_checkpoint(directory)
    if found is not None:
        raise CheckpointError(
            f"{found} is a checkpoint of GPT-NeoX; convert it with neox-convert from-neox "
            f"{shlex.quote(str(found))} --output imported, then load imported",
            code="gpt-neox-checkpoint",
        )


def offer_earlier(directory: Path, damaged: Path | None, *, on_every_host: bool = False) -> str:
    """Return the end of an error message: how to resume from the newest complete one before `damaged`."""
    before = None if damaged is None else iteration_of(final_name(damaged))
    others = [
        path
        for path in complete_checkpoints(directory)
        if path != damaged and (before is None or (iteration_of(path.name) or 0) < before)
    ]
    if not others:
        return (
            "; this folder contains no earlier complete checkpoint: without a copy of its files, train anew "
            "with load, save and log-dir set to other folders"
        )
    name = others[-1].name
    where = " on every host" if on_every_host else ""
    return f"; to resume from the complete checkpoint {name}, run{where}: echo {name} > {directory / LATEST}"


def final_name(folder: Path) -> str:
    """Return the name of a checkpoint's folder; of one that was being replaced, the one that it had."""
    return _final(folder) if folder.name.endswith(".replaced") else folder.name


def _final(folder: Path) -> str:
    found = _LEFTOVER.fullmatch(folder.name)
    return folder.name if found is None else found[1]


def unfinished(final: Path) -> Path:
    """Return the hidden folder in which a checkpoint is written before it is renamed."""
    return final.with_name(f".{final.name}.saving")


def begin(temporary: Path) -> None:
    """Create the hidden folder for a new checkpoint, after removing leftovers of earlier runs."""
    temporary.parent.mkdir(parents=True, exist_ok=True)
    _tidy(temporary.parent)
    temporary.mkdir()


def abandon(temporary: Path) -> None:
    """Delete an unfinished checkpoint."""
    shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, final: Path) -> None:
    """Rename a finished checkpoint to its final name and point `latest` at it."""
    place(temporary, final)
    announce(final)


def place(temporary: Path, final: Path) -> None:
    """Rename a finished checkpoint to its final name, and keep the one that had it as `.replaced`."""
    flush_folder(temporary)
    if _has_manifest(final):
        _discard(_replaced(final))
        final.rename(_replaced(final))
    elif os.path.lexists(final):
        _move_away(final)
    temporary.rename(final)
    flush_folder(final.parent)


def announce(final: Path) -> None:
    """Point `latest` at a checkpoint, and delete the one that it has replaced."""
    point_latest(final.parent, final.name)
    _discard(_replaced(final))


def restore(final: Path) -> None:
    """Give a checkpoint that was to be replaced its name again, if no other has it."""
    if _replaced(final).exists() and not final.exists():
        _replaced(final).rename(final)


def _replaced(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def withdraw(final: Path) -> None:
    """Make a checkpoint unfinished again."""
    final.rename(unfinished(final))


def upload_mark(final: Path) -> Path:
    """Return the file that exists while a checkpoint is uploaded."""
    return final.with_name(f".{final_name(final)}.uploading")


def marks_of_uploads(directory: Path) -> list[Path]:
    """Return the marks of all uploads of checkpoints in a folder."""
    return [*directory.glob(".*.uploading")]


def keep_newest(directory: Path, number: int, iteration: int) -> None:
    """Delete all but the newest `number` of the checkpoints up to `iteration`, and those being uploaded."""
    found = {path: iteration_of(path.name) for path in directory.iterdir() if _has_manifest(path)}
    past = sorted((own, path) for path, own in found.items() if own is not None and own <= iteration)
    for _, path in past[: max(0, len(past) - number)]:
        if upload_mark(path).exists():
            continue
        if not _is_writable(path):
            _warn_once(f"{path} is write-protected: it is kept")
        elif _discard(path):
            logger.info("deleted checkpoint %s", path)


def _has_manifest(folder: Path) -> bool:
    """Return whether a folder is a complete checkpoint; False if it cannot be read, which blocks no save."""
    return os.path.isfile(folder / MANIFEST)


def _is_writable(folder: Path) -> bool:
    """Return whether nothing of a checkpoint is protected, so that it is deleted whole; of a link, always."""
    # First the folder: what is in one that cannot be read cannot be listed.
    if folder.is_symlink():
        return True
    return os.access(folder, os.R_OK | os.W_OK | os.X_OK) and all(
        os.access(path, os.W_OK) for path in folder.iterdir()
    )


def _discard(path: Path) -> bool:
    """Delete what has this name; of a link, the link. Return whether nothing is left of it.

    What cannot be deleted is left with a hidden name.
    """
    hidden = path
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return True
        if not path.name.endswith(".deleted"):
            hidden = _free(lambda number: path.with_name(f".{_final(path)}{number}.deleted"))
            path.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        _warn_once(f"cannot delete {hidden}: {error}; the next save tries again")
        return False
    return True


def _move_away(path: Path) -> None:
    """Give what is not ours, and has a name that we need, another one."""
    other = _free(lambda number: path.with_name(f"{path.name}.other{number}"))
    path.rename(other)
    logger.warning("%s was not written by a run: moved it to %s", path, other)


def _free(name: Callable[[str], Path]) -> Path:
    """Return the first path that does not exist, of a function of the number in its name."""
    candidates = (name(f".{number}" if number else "") for number in count())
    return next(path for path in candidates if not os.path.lexists(path))


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def point_latest(directory: Path, name: str) -> None:
    """Write the name of a checkpoint into `latest`."""
    latest = directory / LATEST
    if os.path.exists(latest) and not os.path.isfile(latest):
        _move_away(latest)
    for leftover in directory.glob(f".{LATEST}.*.new"):
        _discard(leftover)
    with atomic_write(latest, is_durable=True) as file:
        file.write(name + "\n")


def _tidy(directory: Path) -> None:
    for path in sorted(directory.iterdir()):
        leftover = _LEFTOVER.fullmatch(path.name)
        if leftover is None or iteration_of(leftover[1]) is None:
            continue
        final = directory / leftover[1]
        if path == _replaced(final) and _has_manifest(path) and not os.path.lexists(final):
            path.rename(final)
        elif _discard(path) and leftover[2] == "saving":
            logger.info("removed the unfinished checkpoint %s", path)

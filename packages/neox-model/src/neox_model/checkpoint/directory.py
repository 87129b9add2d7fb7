"""The folder of checkpoints: their names, the file `latest`, and atomic creation and deletion.

A checkpoint is written into a hidden folder next to its final place and renamed when complete, so a folder
named `global_stepN` is always complete. `latest` is replaced by a rename too, and deletion starts with a
rename. Only the training run that saves removes leftovers; readers never write.
"""

import logging
import re
import shlex
import shutil
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

_LEFTOVER = re.compile(r"\.(\w+)\.(saving|replaced|deleted)")

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
        f"{offer_earlier(directory, None)}"
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
            f"{shlex.quote(str(found))} --output imported, then load imported"
        )


def offer_earlier(directory: Path, damaged: Path | None, *, on_every_host: bool = False) -> str:
    """Return the end of an error message: how to resume from the newest complete one before `damaged`."""
    before = None if damaged is None else iteration_of(final_name(damaged))
    others = [
        path
        for path in complete_checkpoints(directory)
        if path != damaged and (before is None or _iteration(path) < before)
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
    found = _LEFTOVER.fullmatch(folder.name)
    return found[1] if found is not None and found[2] == "replaced" else folder.name


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
    if final.exists():
        final.rename(_replaced(final))
    temporary.rename(final)
    flush_folder(final.parent)


def announce(final: Path) -> None:
    """Point `latest` at a checkpoint, and delete the one that it has replaced."""
    point_latest(final.parent, final.name)
    if _replaced(final).exists():
        shutil.rmtree(_replaced(final))


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


def keep_newest(directory: Path, count: int, iteration: int) -> None:
    """Delete all but the newest `count` of the checkpoints up to `iteration`, and those being uploaded."""
    past = [path for path in complete_checkpoints(directory) if _iteration(path) <= iteration]
    for path in past[: max(0, len(past) - count)]:
        if upload_mark(path).exists():
            continue
        hidden = directory / f".{path.name}.deleted"
        path.rename(hidden)
        shutil.rmtree(hidden)
        logger.info("deleted checkpoint %s", path)


def _iteration(path: Path) -> int:
    iteration = iteration_of(path.name)
    assert iteration is not None, "only folders of checkpoints are passed"
    return iteration


def point_latest(directory: Path, name: str) -> None:
    """Write the name of a checkpoint into `latest`."""
    with atomic_write(directory / LATEST, is_durable=True) as file:
        file.write(name + "\n")


def _tidy(directory: Path) -> None:
    for path in directory.glob(f".{LATEST}.*.new"):
        path.unlink()
    for path in directory.iterdir():
        leftover = _LEFTOVER.fullmatch(path.name)
        if leftover is None or iteration_of(leftover[1]) is None:
            continue
        final = directory / leftover[1]
        if leftover[2] == "replaced" and not final.exists():
            path.rename(final)
        else:
            shutil.rmtree(path)
            logger.info("removed the unfinished checkpoint %s", path)

"""Find the checkpoint that a command line names."""

import os
from pathlib import Path

from neox_config.counted import first_few
from neox_config.facts.checkpoints import (
    LATEST,
    MANIFEST,
    checkpoint_name,
    complete_checkpoints,
    iteration_of,
)
from neox_config.files import names_in
from neox_model.checkpoint.directory import final_name, find_latest, refuse_gpt_neox
from neox_model.checkpoint.errors import CheckpointError
from neox_model.inspection.recognition import CHECKPOINT, why_another

__all__ = ["RequestError", "all_checkpoints", "find_checkpoint", "is_latest"]

_WHICH = "pass the folder given by `save`, or one checkpoint in it"


class RequestError(CheckpointError):
    """The command line names no checkpoint."""

    exit_code = 2


def find_checkpoint(given: Path, iteration: int | None = None) -> Path:
    """Return the folder of one checkpoint.

    Args:
        given: folder of checkpoints and `latest`, or one checkpoint.
        iteration: which one of a folder of checkpoints; None: the latest.

    Raises:
        RequestError: there is no such checkpoint.
        CheckpointError: `latest` cannot be read, or names no checkpoint; or the checkpoint is GPT-NeoX's.
    """
    _require_folder(given)
    if _is_one(given):
        if iteration is not None and iteration != iteration_of(given.absolute().name):
            raise RequestError(f"{given} is one checkpoint; leave out the iteration {iteration:,}")
        refuse_gpt_neox(given)
        return given
    if iteration is None:
        found = find_latest(given)
        if found is None:
            raise RequestError(_why_none(given))
        return found
    found = given / checkpoint_name(iteration)
    if not found.is_dir():
        there = ", ".join(str(iteration_of(path.name)) for path in complete_checkpoints(given))
        raise RequestError(
            f"{given} contains no checkpoint of iteration {iteration:,}; "
            + (f"choose one of {there}" if there else _WHICH)
        )
    return found


def all_checkpoints(given: Path) -> list[Path]:
    """Return the folders of all checkpoints in a folder, lowest iteration first, also incomplete ones.

    Raises:
        RequestError: there is none, or the folder is a checkpoint itself.
    """
    _require_folder(given)
    if _is_one(given):
        raise RequestError(f"{given} is one checkpoint; leave out --all, or pass {given.absolute().parent}")
    found = {path: iteration_of(path.name) for path in given.iterdir() if path.is_dir()}
    folders = [path for path, iteration in found.items() if iteration is not None]
    if not folders:
        raise RequestError(_why_none(given))
    return sorted(folders, key=lambda path: found[path] or 0)


def is_latest(folder: Path) -> bool:
    """Return whether a training would resume from a checkpoint: `latest` names it, or else it is the last."""
    here = folder.absolute()
    try:
        text = (here.parent / LATEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        return complete_checkpoints(here.parent)[-1:] == [here]
    except (OSError, UnicodeDecodeError):
        return False
    name = final_name(here)
    # The old folder is used only as long as a new one of the same name is not complete.
    return text.strip() == name and (here.name == name or not (here.parent / name / MANIFEST).is_file())


def _is_one(given: Path) -> bool:
    return (given / MANIFEST).exists() or iteration_of(given.absolute().name) is not None


def _why_none(given: Path) -> str:
    """Return why a folder cannot be loaded from, and what to pass in its place."""
    inside = names_in(given, lambda entry: bool(entry.is_dir() and _saved_in(given / entry.name)))
    which = _WHICH
    if len(inside) == 1:
        which = f"pass {given / inside[0]}, which contains checkpoints"
    elif inside:
        which = f"pass one of its subfolders that do: {first_few([given / name for name in inside], 5)}"
    return why_another(given, CHECKPOINT) or f"{given} contains no checkpoint; {which}"


def _saved_in(folder: Path) -> list[Path]:
    try:
        return complete_checkpoints(folder)
    except OSError:
        return []


def _require_folder(given: Path) -> None:
    if not given.is_dir():
        raise RequestError(why_another(given, CHECKPOINT) or f"{given} is not a folder; {_WHICH}")
    if not os.access(given, os.R_OK | os.X_OK):
        raise RequestError(f"{given} cannot be read by this user; change its permissions")

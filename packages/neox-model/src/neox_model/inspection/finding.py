"""Find the checkpoint that a command line names, and recognize what else a path contains; without torch."""

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from neox_config.facts.checkpoints import (
    LATEST,
    MANIFEST,
    checkpoint_name,
    complete_checkpoints,
    gpt_neox_checkpoint,
    iteration_of,
)
from neox_config.spec.recorded import latest_checkpoint
from neox_model.checkpoint.directory import final_name, find_latest, refuse_gpt_neox
from neox_model.checkpoint.errors import CheckpointError

__all__ = [
    "ADAPTERS",
    "GPT_NEOX",
    "MODEL",
    "PEFT",
    "RequestError",
    "all_checkpoints",
    "find_checkpoint",
    "is_latest",
    "is_model",
    "why_another",
]

ADAPTERS = "adapter_config.json"
"""File that describes adapters of PEFT."""
CHECKPOINT = "a checkpoint of this project"
MODEL = "a model of transformers"
GPT_NEOX = "a checkpoint of GPT-NeoX"
PEFT = "adapters of PEFT"


def is_model(folder: Path) -> bool:
    """Return whether a folder contains a model of transformers."""
    return (folder / "config.json").is_file()


def _is_peft(folder: Path) -> bool:
    return (folder / ADAPTERS).is_file()


# What a folder can contain, how it is recognized, and the command for it.
_KINDS: Mapping[str, tuple[Callable[[Path], object], str]] = {
    CHECKPOINT: (
        latest_checkpoint,
        "it can be loaded as it is, and neox-convert to-hf --load {} --output DIR exports it to transformers",
    ),
    GPT_NEOX: (gpt_neox_checkpoint, "convert it with neox-convert from-neox {} --output DIR"),
    PEFT: (_is_peft, "convert them with neox-convert from-peft {} --base DIR --output DIR"),
    MODEL: (is_model, "convert it with neox-convert from-hf {} --output DIR"),
}


def why_another(path: Path, wanted: str) -> str | None:
    """Return what a path contains in place of what a command reads, and what to do; None if that is unknown.

    Args:
        path: folder, or a file in it.
        wanted: what the command reads; a key of the table above.
    """
    folder = path.parent if path.is_file() else path
    if _KINDS[wanted][0](folder):
        return None if folder == path else f"{path} is a file; pass its folder, {folder}"
    for kind, (is_kind, remedy) in _KINDS.items():
        if is_kind(folder):
            return f"{folder} contains {kind}, not {wanted}; {remedy.format(shlex.quote(str(folder)))}"
    return None


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
            raise _refusal(given, "contains no checkpoint")
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
        raise _refusal(given, "contains no checkpoint")
    return sorted(folders, key=lambda path: found[path] or 0)


def is_latest(folder: Path) -> bool:
    """Return whether a run would resume from a checkpoint: `latest` names it, or else it is the last."""
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


def _require_folder(given: Path) -> None:
    if not given.is_dir():
        raise _refusal(given, "is not a folder")
    if not os.access(given, os.R_OK | os.X_OK):
        raise RequestError(f"{given} cannot be read by this user; change its permissions")


def _refusal(given: Path, what: str) -> RequestError:
    return RequestError(why_another(given, CHECKPOINT) or f"{given} {what}; {_WHICH}")

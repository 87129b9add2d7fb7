"""Kept checkpoints, as far as the launcher reads them: their folders and manifests."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from neox_launcher.config import Resolved
from neox_launcher.config.resume import IN_EFFECT, compare, flat_values, in_effect
from neox_launcher.errors import LaunchError

__all__ = ["KeptCheckpoint", "changed_parameters", "find_kept", "latest_kept"]

_MANIFEST = "manifest.json"
_NAME = re.compile(r"global_step(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """One complete checkpoint.

    Args:
        path: its folder, absolute.
        iteration: finished updates.
        config: flat parameter name to value, of the training that wrote it.
        sizes: the data-, model- and pipe-parallel sizes of that training.
    """

    path: Path
    iteration: int
    config: Mapping[str, Any]
    sizes: tuple[int, int, int]


def find_kept(text: str, folders: tuple[str | None, ...], *, option: str) -> KeptCheckpoint:
    """Find the checkpoint that an option names.

    Args:
        text: a checkpoint's folder, its name (`global_step100`) or its iteration (`100`).
        folders: where names and iterations are looked for, in this order.
        option: how the option is called, for messages.

    Raises:
        LaunchError: there is no such checkpoint, or its manifest cannot be read.
    """
    name = f"global_step{text}" if text.isdecimal() else text
    searched = [Path(folder) for folder in dict.fromkeys(folders) if folder is not None]
    for path in (Path(name), *(folder / name for folder in searched)):
        if (path / _MANIFEST).is_file():
            return _read(path.absolute())
    found = sorted(_names(searched), key=lambda found: int(found.removeprefix("global_step")))
    there = f"there are {', '.join(found)}" if found else "there are none"
    where = " or ".join(str(folder) for folder in searched) or "the working directory"
    raise LaunchError(
        f"{option} {text}: no such complete checkpoint in {where} ({there}); "
        "name a checkpoint's folder, its name or its iteration"
    )


def latest_kept(folder: str | None) -> KeptCheckpoint | None:
    """Find the checkpoint that a training with this `load` continues from; None where it starts anew.

    Raises:
        LaunchError: `latest` names a checkpoint that is not there, or its manifest cannot be read.
    """
    if folder is None:
        return None
    names = sorted(_names([Path(folder)]), key=lambda name: int(name.removeprefix("global_step")))
    latest = Path(folder, "latest")
    if latest.is_file():
        return find_kept(latest.read_text(encoding="utf-8").strip(), (folder,), option=f"{latest} names")
    return _read(Path(folder, names[-1]).absolute()) if names else None


def changed_parameters(kept: KeptCheckpoint, resolved: Resolved) -> list[str]:
    """List the parameters by which a training computes something else than the one that wrote a checkpoint.

    What follows from the tokenizer's files is left to the workers, which read them.

    Args:
        kept: the checkpoint.
        resolved: the present configuration.

    Returns:
        `NAME: OLD there, NEW here`, one for each.
    """
    in_use = in_effect(resolved)
    here = flat_values(resolved.config) | {IN_EFFECT: in_use}
    changes = compare(kept.config, here, devices=prod(kept.sizes))
    labels = {label for values in in_use.values() for label in values}
    return [str(change) for change in changes.model + changes.training if change.label in labels]


def _names(folders: list[Path]) -> set[str]:
    paths = (path.parent for folder in folders for path in folder.glob(f"global_step*/{_MANIFEST}"))
    return {path.name for path in paths if _NAME.fullmatch(path.name)}


def _read(path: Path) -> KeptCheckpoint:
    manifest = path / _MANIFEST
    try:
        contents = json.loads(manifest.read_text(encoding="utf-8"))["contents"]
        layout = contents["layout"]
        return KeptCheckpoint(
            path=path,
            iteration=int(contents["iteration"]),
            config=dict(contents["config"]),
            sizes=(int(layout["data"]), int(layout["model"]), int(layout["pipe"])),
        )
    except OSError as error:
        raise LaunchError(f"{manifest} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise LaunchError(
            f"{manifest} is damaged ({type(error).__name__}); use another checkpoint"
        ) from error

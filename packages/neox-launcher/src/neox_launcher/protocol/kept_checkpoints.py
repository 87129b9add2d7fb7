"""Existing checkpoints, as far as the launcher reads them: their folders and manifests."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neox_config.errors import LaunchError
from neox_config.facts.checkpoints import (
    LATEST,
    MANIFEST,
    checkpoint_name,
    complete_checkpoints,
    is_checkpoint,
    iteration_of,
)
from neox_config.facts.stores import is_url

__all__ = ["KeptCheckpoint", "find_kept", "latest_kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """One complete checkpoint.

    Args:
        path: absolute path of its folder.
        iteration: number of completed iterations.
        training: state of the training loop.
    """

    path: Path
    iteration: int
    training: Mapping[str, Any]


def find_kept(text: str, folders: tuple[str | None, ...], *, option: str) -> KeptCheckpoint:
    """Find the checkpoint that an option names.

    Args:
        text: folder of a checkpoint, its name (`global_step100`) or its iteration (`100`).
        folders: folders that are searched for names and iterations, in this order.
        option: name of the option, for messages.

    Raises:
        LaunchError: there is no such checkpoint, or its manifest cannot be read.
    """
    name = checkpoint_name(int(text)) if text.isdecimal() else text
    searched = [Path(folder) for folder in dict.fromkeys(folders) if folder is not None]
    for path in (Path(name), *(folder / name for folder in searched)):
        if (path / MANIFEST).is_file():
            return _read(path.absolute())
    found = _names(searched)
    there = f"available: {', '.join(found)}" if found else "none available"
    where = " or ".join(str(folder) for folder in searched) or "the working directory"
    raise LaunchError(
        f"{option} {text}: no such complete checkpoint in {where} ({there}); "
        "give the folder, the name or the iteration of a checkpoint"
    )


def latest_kept(folder: str | None) -> KeptCheckpoint | None:
    """Find the checkpoint from which a run with this `load` resumes; None if it starts from new weights.

    Raises:
        LaunchError: `latest` is damaged or names a missing checkpoint, or the manifest is damaged; or the
            folder is in an object store.
    """
    if folder is None:
        return None
    if is_url(folder):
        raise LaunchError(
            f"load: {folder} is in an object store, and only checkpoints in folders can be verified; copy it "
            "into a folder, and set load to that"
        )
    names, latest = _names([Path(folder)]), Path(folder, LATEST)
    remedy = "remove load to start from new weights"
    if names:
        remedy = f"to resume from the last one, run: echo {names[-1]} > {shlex.quote(str(latest))}"
    try:
        name = latest.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        if is_checkpoint(Path(folder)):
            return _read(Path(folder).absolute())
        return _read(Path(folder, names[-1]).absolute()) if names else None
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{latest} cannot be read ({error}); {remedy}", code="not-readable") from error
    # `.replaced`: the old folder, if the machine stopped while a new one of the same name was replacing it.
    for path in (Path(folder, name), Path(folder, f".{name}.replaced")):
        if iteration_of(name) is not None and (path / MANIFEST).is_file():
            return _read(path.absolute())
    raise LaunchError(
        f"{latest} names {name!r}, which is not a complete checkpoint there; {remedy}",
        code="incomplete-checkpoint",
    )


def _names(folders: list[Path]) -> list[str]:
    """Return the names of complete checkpoints, the earliest first."""
    try:
        names = {path.name for folder in folders for path in complete_checkpoints(folder)}
    except OSError as error:
        raise LaunchError(
            f"{error.filename} cannot be read: {error.strerror}; make it readable, or give another folder"
        ) from error
    return sorted(names, key=lambda name: iteration_of(name) or 0)


def _read(path: Path) -> KeptCheckpoint:
    manifest = path / MANIFEST
    try:
        contents = json.loads(manifest.read_text(encoding="utf-8"))["contents"]
        return KeptCheckpoint(
            path=path,
            iteration=int(contents["iteration"]),
            training=dict(contents.get("training", {})),
        )
    except OSError as error:
        raise LaunchError(f"{manifest} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise LaunchError(
            f"{manifest} is damaged ({type(error).__name__}); use another checkpoint", code="damaged-manifest"
        ) from error

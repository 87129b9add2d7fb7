"""Existing checkpoints, as far as the launcher reads them: their folders and manifests."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from neox_config import Resolved
from neox_config.errors import ConfigError, LaunchError
from neox_config.facts.checkpoints import (
    LATEST,
    MANIFEST,
    checkpoint_name,
    complete_checkpoints,
    is_checkpoint,
    iteration_of,
)
from neox_config.facts.stores import is_url
from neox_config.spec.resume import IN_EFFECT, compare, flat_values, in_effect

__all__ = ["KeptCheckpoint", "changed_parameters", "find_kept", "latest_kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """One complete checkpoint.

    Args:
        path: absolute path of its folder.
        iteration: number of completed iterations.
        config: flat parameter name to value of the run that wrote it.
        sizes: data-, model- and pipe-parallel sizes of that run.
        training: state of the training loop.
    """

    path: Path
    iteration: int
    config: Mapping[str, Any]
    sizes: tuple[int, int, int]
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


def changed_parameters(kept: KeptCheckpoint, resolved: Resolved) -> list[str]:
    """List the parameters whose change makes a run compute something else than a checkpoint's run.

    Values derived from tokenizer files are checked by the workers, which read these files.

    Args:
        kept: the checkpoint.
        resolved: current configuration.

    Returns:
        `NAME: OLD in the checkpoint, NEW in this run` for each parameter.

    Raises:
        LaunchError: the checkpoint's configuration is damaged, or cannot be compared.
    """
    in_use = in_effect(resolved)
    here = flat_values(resolved.config) | {IN_EFFECT: in_use}
    try:
        changes = compare(kept.config, here, devices=prod(kept.sizes))
    except ConfigError as error:
        raise LaunchError(
            f"{kept.path / MANIFEST} is damaged ({error}); use another checkpoint", code="damaged-manifest"
        ) from error
    if changes.unknown is not None:
        raise LaunchError(
            f"{kept.path} was written by another version, and its configuration cannot be compared: "
            f"{changes.unknown}; use a checkpoint that this version wrote",
            code="other-version",
        )
    labels = {label for values in in_use.values() for label in values}
    return [str(change) for change in changes.model + changes.training if change.label in labels]


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
        layout = contents["layout"]
        return KeptCheckpoint(
            path=path,
            iteration=int(contents["iteration"]),
            config=dict(contents["config"]),
            sizes=(int(layout["data"]), int(layout["model"]), int(layout["pipe"])),
            training=dict(contents.get("training", {})),
        )
    except OSError as error:
        raise LaunchError(f"{manifest} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise LaunchError(
            f"{manifest} is damaged ({type(error).__name__}); use another checkpoint", code="damaged-manifest"
        ) from error

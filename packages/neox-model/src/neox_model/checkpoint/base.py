"""The checkpoint of the model that adapters are added to: its weights are loaded, and never saved again.

A checkpoint of adapters records the SHA-256 of the base's manifest, which contains a checksum of every piece
of its tensors. Adapters are loaded only on the base that they were trained with.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from neox_config.facts.checkpoints import MANIFEST, checkpoint_name
from neox_config.facts.stores import is_url
from neox_config.spec.refusals import other_model
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint.comparison import changes_since, log_unknown_changes, refuse
from neox_model.checkpoint.contents import Manifest, is_count, manifest_sha256
from neox_model.checkpoint.downloads import local_folder
from neox_model.checkpoint.errors import CheckpointError, DamagedManifestError
from neox_model.checkpoint.logical import check_model_states, fill_model_states
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.checkpoint.shards import ShardReader
from neox_model.checkpoint.whole_weights import (
    check_wanted,
    fill_wanted,
    model_problems,
    wanted_weight,
)
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import Writable, model_states, named_logical_parameters

__all__ = [
    "BASE",
    "base_record",
    "check_base",
    "load_base",
    "record_in",
    "recorded_base",
]

logger = logging.getLogger(__name__)

# Recorded in a checkpoint of adapters: the folder, the iteration and the SHA-256 of the manifest of the base.
BASE = "base"
_OF_ADAPTERS = "lora_"
# Limit of Linux.
_LONGEST_PATH = 4096


def load_base(
    directory: str | None,
    model: nn.Module,
    *,
    adapters: Path | None,
    groups: Groups,
    config: Mapping[str, Any],
    writable: Writable,
    cache: str | None = None,
) -> dict[str, Any]:
    """Load the weights that are not trained, and states, from a checkpoint of the base. Collective.

    That is the one that the adapters were trained on, and without adapters to load the latest.

    Args:
        directory: folder of the checkpoints of the base, or its URL in an object store; None: there are no
            adapters; nothing is done.
        adapters: folder of the checkpoints of the adapters that will be loaded; None: new ones are trained.
        model: the model with adapters; its other weights are overwritten.
        groups: this rank's process groups.
        config: values that this run would record in a checkpoint, compared with the base's.
        writable: context manager that returns the tensor to fill for a parameter; None: other ranks fill it.
        cache: directory of downloads from object stores; None for the default.

    Returns:
        What a checkpoint of the adapters records about the base, under `BASE`; empty without adapters.

    Raises:
        CheckpointError: the base is missing, damaged, of a different model, or a checkpoint of adapters; the
            same on all ranks.
    """
    if directory is None:
        return {}
    folder = _find(directory, adapters, groups, cache)
    frozen = [
        wanted_weight(*named) for named in named_logical_parameters(model) if not named[1].requires_grad
    ]
    states = model_states(model)
    names = set().union(*all_gather_object(groups.control, {weight.name for weight in frozen}))
    with shared_outcome(groups.control, f"loading the base {folder}", keeps_bugs=True):
        manifest = Manifest.read(folder)
        changes = changes_since(manifest, config)
        of_model = tuple(change for change in changes.model if not change.label.startswith(_OF_ADAPTERS))
        refuse(other_model(replace(changes, model=of_model), remedy="set the base's values, or another base"))
        recorded = record_in(manifest)
        if recorded is not None:
            raise CheckpointError(
                f"{folder} is a checkpoint of adapters, which contains no model; set lora-base to their "
                f"base, {recorded['folder']}, or merge them first"
            )
        problems = model_problems(names, ((weight.name, weight.shape) for weight in frozen), manifest)
        if problems:
            raise CheckpointError(
                f"the base {folder} contains a different model: {problems[0]}; set the base's values, or "
                "lora-base to another folder"
            )
        for name in manifest.files:
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"the base {folder} lacks {name} on this host; if it was saved with "
                    "use-node-local-storage, copy the files of all hosts into one folder"
                )
        reader = ShardReader(folder, manifest)
        check_wanted(frozen, reader)
        check_model_states(states, manifest, reader)
        digest = manifest_sha256(folder)
    fill_wanted(frozen, reader, writable=writable)
    fill_model_states(states, reader)
    if groups.world.rank == 0:
        log_unknown_changes(changes)
    logger.info("adapters are added to the weights of %s", folder)
    place = directory if is_url(directory) else str(Path(directory).absolute())
    return {BASE: _record(place, manifest.iteration, digest)}


def base_record(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint of adapters records about its base, under `BASE`.

    Args:
        checkpoint: one checkpoint of the base.

    Raises:
        CheckpointError: it is damaged, or its folder has another name than the one under which it is loaded.
    """
    here, iteration = Path(os.path.abspath(checkpoint)), Manifest.read(checkpoint).iteration
    if here.name != checkpoint_name(iteration):
        raise CheckpointError(
            f"{here} contains the checkpoint of iteration {iteration:,}, and with adapters it is only found "
            f"as {checkpoint_name(iteration)}; rename the folder"
        )
    return _record(str(here.parent), iteration, manifest_sha256(checkpoint))


def record_in(manifest: Manifest, folder: Path | None = None) -> Mapping[str, Any] | None:
    """Return what a checkpoint of adapters records about its base; None for a whole model.

    Args:
        manifest: the checkpoint's.
        folder: the checkpoint, if the caller does not name it in errors.

    Raises:
        DamagedCheckpointError: it has another form.
    """
    found = manifest.config.get(BASE)
    if found is None:
        return None
    names = ("folder", "iteration", "manifest_sha256")
    place, iteration, digest = map(found.get, names) if isinstance(found, Mapping) else (None,) * 3
    is_path = isinstance(place, str) and 0 < len(place) <= _LONGEST_PATH and "\0" not in place
    if not (is_path and is_count(iteration) and isinstance(digest, str)):
        problem = "config / base does not contain a folder, an iteration and a SHA-256"
        raise DamagedManifestError(problem, folder)
    return found


def _record(place: str, iteration: int, digest: str | None) -> dict[str, Any]:
    return {"folder": place, "iteration": iteration, "manifest_sha256": digest}


def _find(place: str, adapters: Path | None, groups: Groups, cache: str | None) -> Path:
    """Return the checkpoint of the base: the one that adapters were trained on, or the latest. Collective.

    Raises:
        CheckpointError: the folder or store does not contain it.
    """
    folder: Path | None = None
    name: str | None = None
    with shared_outcome(groups.control, f"finding the base in {place}", keeps_bugs=True):
        if groups.world.rank == 0:
            latest = None if adapters is None else folders.find_latest(adapters)
            recorded = None if latest is None else record_in(Manifest.read(latest), latest)
            name = None if recorded is None else checkpoint_name(recorded["iteration"])
            if not is_url(place):
                # Another checkpoint of this iteration is refused when the bases are compared.
                folder = folders.find_latest(Path(place)) if name is None else Path(place, name)
            if folder is not None and not (folder / MANIFEST).is_file():
                raise CheckpointError(
                    f"{place} does not contain {name}, on which the adapters in {adapters} were trained; "
                    "set lora-base to a folder with it (keep-last-n-checkpoints deletes earlier ones)"
                )
    folder, name = all_gather_object(groups.control, (folder, name))[0]
    if is_url(place):
        directory = local_folder(place, groups, cache=cache, name=name, weights_only=True)
        folder = None if directory is None else folders.find_latest(directory)
    if folder is None:
        raise CheckpointError(f"{place} contains no checkpoint; set lora-base to where the model to adapt is")
    return folder


def check_base(manifest: Manifest, config: Mapping[str, Any]) -> None:
    """Refuse adapters of another base, and weights of a model without adapters for one with them.

    Args:
        manifest: the checkpoint's.
        config: values that this run would record in a checkpoint.

    Raises:
        CheckpointError: the bases differ, only one of the two has adapters, or the manifest is damaged.
    """
    there, here = record_in(manifest), config.get(BASE)
    if there is None and here is None:
        return
    if there is None:
        raise CheckpointError(
            "the checkpoint contains a model without adapters, and this run trains adapters (lora-rank); set "
            "lora-base to its folder and load to a folder of adapters"
        )
    if here is None:
        raise CheckpointError(
            f"the checkpoint contains only adapters of {there['folder']}; set lora-rank, lora-base and "
            "the other lora parameters as in the run that wrote it, or merge the adapters first"
        )
    if there["manifest_sha256"] != here["manifest_sha256"]:
        raise CheckpointError(
            f"the adapters were trained on another base than lora-base: on {_described(there)}, not on "
            f"{_described(here)}; set lora-base to the folder with that base"
        )


def _described(base: Mapping[str, Any]) -> str:
    return f"{base['folder']}, iteration {base['iteration']} (manifest {base['manifest_sha256'][:16]})"


def recorded_base(recorded: Mapping[str, Any], given: Path | None = None) -> Path:
    """Return the checkpoint that adapters were trained on.

    Args:
        recorded: what a checkpoint of adapters records about its base.
        given: folder of the checkpoints of the base; None: the one that is recorded.

    Raises:
        CheckpointError: it does not exist, or its manifest does not have the recorded SHA-256.
    """
    if given is None and is_url(recorded["folder"]):
        raise CheckpointError(
            f"the base of the adapters is in {recorded['folder']}; download it, and give its folder with "
            "--base"
        )
    folder = Path(recorded["folder"]) if given is None else given
    found = folder / checkpoint_name(recorded["iteration"])
    # Unlike the method of a path, it returns False for names that no file system allows.
    if not os.path.isfile(found / MANIFEST):
        raise CheckpointError(
            f"the base of the adapters, {found}, does not exist here; if it was moved or renamed, give its "
            "folder with --base"
        )
    digest = manifest_sha256(found)
    if digest != recorded["manifest_sha256"]:
        raise CheckpointError(
            f"{found} is not the base of the adapters: its manifest has the SHA-256 {str(digest)[:16]}, not "
            f"{recorded['manifest_sha256'][:16]}; give the folder of the right one with --base"
        )
    return found

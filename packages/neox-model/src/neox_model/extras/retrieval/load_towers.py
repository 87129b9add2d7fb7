"""Load the weights of a masked model into the towers of a retrieval model."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from neox_config.spec.refusals import other_model
from neox_model.checkpoint.comparison import changes_since, log_unknown_changes, refuse
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.directory import find_latest
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.checkpoint.shards import ShardReader
from neox_model.checkpoint.whole_weights import check_wanted, fill_wanted, is_continued, wanted_weight
from neox_model.extras.retrieval.towers import BLOCK, QUERY
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import Writable, named_logical_parameters

__all__ = ["load_towers"]

logger = logging.getLogger(__name__)

# What differs between a masked model and a retrieval model of its size.
_OF_RETRIEVAL = ("objective", "ict_head_size", "ict_shared_towers")
_HEAD = "retrieval_head."


def load_towers(
    directory: str | None,
    model: nn.Module,
    *,
    load: Path | None,
    groups: Groups,
    recorded: Mapping[str, Any],
    writable: Writable,
) -> None:
    """Fill the towers with the weights of the latest checkpoint of a masked model, all but their heads.

    Collective over all ranks.

    Args:
        directory: folder of its checkpoints; None: nothing is done.
        model: the retrieval model.
        load: folder of the checkpoints to continue from; if it contains one, nothing is done.
        groups: this rank's process groups.
        recorded: values that this run would record in a checkpoint, compared with the masked model's.
        writable: context manager that returns the tensor to fill for a parameter; None: other ranks fill it.

    Raises:
        CheckpointError: there is none, it is damaged, or it is not a masked model of this size; the same on
            all ranks.
    """
    if directory is None or is_continued(load, groups):
        return
    every = [
        wanted_weight(_without_tower(name), parameter) for name, parameter in named_logical_parameters(model)
    ]
    wanted = [weight for weight in every if not weight.name.startswith(_HEAD)]
    with shared_outcome(groups.control, f"loading bert-load: {directory}", keeps_bugs=True):
        folder = find_latest(Path(directory)) if Path(directory).is_dir() else None
        if folder is None:
            raise CheckpointError(
                f"bert-load: {directory} contains no checkpoint; name the folder of a model"
            )
        manifest = Manifest.read(folder)
        if manifest.config.get("objective") != "masked":
            raise CheckpointError(
                f"bert-load: {folder} is not a masked model; train one with objective: masked"
            )
        changes = changes_since(manifest, recorded)
        others = tuple(change for change in changes.model if change.label not in _OF_RETRIEVAL)
        refuse(other_model(replace(changes, model=others), remedy="set its values, or another bert-load"))
        reader = ShardReader(folder, manifest)
        missing = [weight.name for weight in wanted if weight.name not in manifest.tensors]
        if missing:
            raise CheckpointError(
                f"bert-load: {folder} contains no {missing[0]}; save the masked model again"
            )
        check_wanted(wanted, reader)
    fill_wanted(wanted, reader, writable=writable)
    if groups.world.rank == 0:
        log_unknown_changes(changes)
    logger.info("the towers start with the weights of %s", folder)


def _without_tower(name: str) -> str:
    first, _, rest = name.partition(".")
    return rest if first in (QUERY, BLOCK) else name

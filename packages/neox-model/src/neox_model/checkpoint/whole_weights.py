"""Reading weights of another checkpoint into parameters of a model, before an engine has it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from neox_model.checkpoint.blocks import Range, block_numel
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.directory import find_latest
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.checkpoint.shards import ShardReader
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import Writable

__all__ = [
    "WantedWeight",
    "check_wanted",
    "fill_wanted",
    "is_continued",
    "model_problems",
    "shape_problems",
    "wanted_weight",
]


@dataclass(frozen=True, slots=True)
class WantedWeight:
    """A parameter to fill, and the range of the whole weight that this rank holds.

    Args:
        name: name of the weight in the checkpoint.
        parameter: the parameter.
        shape: shape of the whole weight.
        wanted: the range.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    wanted: Range


def is_continued(load: Path | None, groups: Groups) -> bool:
    """Return True if a run continues from a checkpoint, whose weights replace all others. Collective.

    Args:
        load: folder of the checkpoints to continue from; None: none.
        groups: this rank's process groups.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    with shared_outcome(groups.control, f"finding a checkpoint in {load}", keeps_bugs=True):
        found = load is not None and groups.world.rank == 0 and find_latest(load) is not None
    return any(all_gather_object(groups.control, found))


def wanted_weight(name: str, parameter: nn.Parameter) -> WantedWeight:
    """Return what a parameter of this rank holds of a weight with a name in a checkpoint."""
    logical = parameter.logical  # type: ignore[attr-defined]
    return WantedWeight(name, parameter, logical.shape, (logical.slices, 0, block_numel(logical.slices)))


def shape_problems(shapes: Iterable[tuple[str, tuple[int, ...]]], manifest: Manifest) -> list[str]:
    """Return a clause for each weight, given with its shape, that has another shape in the checkpoint."""
    return [
        f"{name} has the shape {manifest.tensors[name].shape} in the checkpoint but {shape} in this model"
        for name, shape in shapes
        if name in manifest.weight_names and manifest.tensors[name].shape != shape
    ]


def model_problems(
    names: set[str], shapes: Iterable[tuple[str, tuple[int, ...]]], manifest: Manifest
) -> list[str]:
    """Return a clause for each weight that only a checkpoint or a model has, or that has another shape.

    Args:
        names: logical names of the weights of all ranks.
        shapes: names and shapes of the weights of this rank.
        manifest: the checkpoint's.
    """
    stored = manifest.weight_names
    return [
        *(f"{name} is not in the checkpoint" for name in sorted(names - stored)),
        *(f"{name} is in the checkpoint but not in this model" for name in sorted(stored - names)),
        *shape_problems(shapes, manifest),
    ]


def check_wanted(weights: Sequence[WantedWeight], reader: ShardReader) -> None:
    """Check that all weights can be read.

    Raises:
        DamagedCheckpointError: one is damaged.
    """
    reader.check((weight.name, weight.wanted, weight.parameter.dtype) for weight in weights)


def fill_wanted(weights: Sequence[WantedWeight], reader: ShardReader, *, writable: Writable) -> None:
    """Fill the parameters, which `check_wanted` has checked.

    Args:
        weights: what to fill.
        reader: of the checkpoint's shards.
        writable: context manager that returns the tensor to fill for a parameter; None: other ranks fill it.
    """
    for weight in weights:
        with writable(weight.parameter) as whole, torch.no_grad():
            if whole is not None:
                target = whole.view(-1)[: block_numel(weight.wanted[0])]
                reader.fill(target, weight.name, weight.wanted)

"""Optimizer states that differ between data-parallel ranks: which part of a stored tensor each rank has.

An optimizer declares them in `replica_states`, with its `data_group`. A checkpoint has them as three kinds of
tensors. `own` and `mean`: each replica has one value per element; the tensor has the shape of the weight and
one more dimension first, the replicas. `part`: the replicas share the elements of what a tensor-parallel rank
holds; the tensor has the shape of the weight.

With another number of replicas these divide the stored rows of an `own` state among themselves: replica j of
D reads the sum of the rows i with i = j mod D, times D over the number of rows. These states are errors that
replicas add to what they average, and the mean error stays the same. Of a `mean` state every replica reads
the mean of all rows. One replica has neither `own` nor `part` states.

An optimizer whose replicas have different weights for a while has `shared_weight`, the value of a weight that
all replicas have; a checkpoint has this one as the weight.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from neox_model.checkpoint.blocks import Range, block_numel
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.errors import DamagedManifestError, quoted
from neox_model.checkpoint.logical import Fragment
from neox_model.checkpoint.shards import Part
from neox_model.parallel.groups import part_length

__all__ = [
    "is_replica_state",
    "log_other_replicas",
    "replica_factor",
    "replica_parts",
    "replica_ranges",
    "replica_tensor",
    "replicas_differ",
    "shared_weight",
]

logger = logging.getLogger(__name__)


def is_replica_state(optimizer: Any, key: str) -> bool:
    """Return True if data-parallel ranks have different values of a state."""
    return key in getattr(optimizer, "replica_states", {})


def replicas_differ(optimizer: Any) -> bool:
    """Return True if data-parallel ranks have different weights."""
    return getattr(optimizer, "replicas_differ", False) and optimizer.data_group.size > 1


def shared_weight(fragment: Fragment, optimizer: Any) -> Tensor:
    """Return the values of a fragment's weights that all replicas have, 1-D."""
    if not hasattr(optimizer, "shared_weight"):
        return fragment.weight
    return fragment.part_of(optimizer.shared_weight(fragment.held.holder))


def replica_parts(fragment: Fragment, optimizer: Any) -> list[Part]:
    """Return this replica's states of a fragment, as parts to write named `NAME/STATE`."""
    logical, parts = fragment.logical, []
    for key, value in optimizer.state.get(fragment.held.holder, {}).items():
        if not is_replica_state(optimizer, key):
            continue
        name = f"{fragment.name}/{key}"
        if optimizer.replica_states[key] != "part":
            group = optimizer.data_group
            shape = (group.size, *logical.shape)
            block = ((group.rank, group.rank + 1), *logical.slices)
            parts.append(Part(name=name, shape=shape, block=block, start=0, values=fragment.part_of(value)))
            continue
        start, stop = _served(fragment, optimizer)
        if start < stop:
            values = value.detach()[: stop - start]
            parts.append(
                Part(name=name, shape=logical.shape, block=logical.slices, start=start, values=values)
            )
    return parts


def replica_ranges(fragment: Fragment, optimizer: Any, key: str, shape: tuple[int, ...]) -> list[Range]:
    """Return the ranges of a stored state whose sum, times `replica_factor`, is this replica's.

    There are none for errors of a replica without others, and of replicas beyond the stored number.

    Args:
        fragment: the fragment of a weight.
        optimizer: the optimizer with the state, unwrapped.
        key: the state's name.
        shape: shape of the whole state in the checkpoint.

    Raises:
        DamagedCheckpointError: the shape is not that of the weight's state.
    """
    logical, group = fragment.logical, optimizer.data_group
    has_rows = optimizer.replica_states[key] != "part"
    of_weight = shape[1:] if has_rows else shape
    if of_weight != logical.shape or (has_rows and shape[0] == 0):
        raise DamagedManifestError(
            f"the state {quoted(key)!r} of {fragment.name} has the shape {shape}, "
            f"and the weight {logical.shape}"
        )
    is_mean = optimizer.replica_states[key] == "mean"
    if group.size == 1 and not is_mean:
        return []
    if not has_rows:
        return [(logical.slices, *_served(fragment, optimizer))]
    rows = range(shape[0]) if is_mean and shape[0] != group.size else range(group.rank, shape[0], group.size)
    return [(((row, row + 1), *logical.slices), 0, block_numel(logical.slices)) for row in rows]


def replica_factor(optimizer: Any, key: str, shape: tuple[int, ...]) -> float:
    """Return the factor of the sum of the ranges, by which the mean over replicas is that of the rows."""
    kind, replicas = optimizer.replica_states[key], optimizer.data_group.size
    if kind == "part":
        return 1.0
    return 1 / shape[0] if kind == "mean" and shape[0] != replicas else replicas / shape[0]


def replica_tensor(fragment: Fragment, optimizer: Any, key: str) -> Tensor:
    """Return the memory of this replica's state of a fragment, 1-D, allocated if there is none yet."""
    holder = fragment.held.holder
    state = optimizer.state[holder]
    if optimizer.replica_states[key] != "part":
        if key not in state:
            state[key] = torch.zeros_like(holder)
        return fragment.part_of(state[key])
    if key not in state:
        state[key] = holder.new_zeros(part_length(holder.numel(), optimizer.data_group.size))
    start, stop = _served(fragment, optimizer)
    values: Tensor = state[key][: stop - start]
    return values


def log_other_replicas(manifest: Manifest, optimizer: Any) -> None:
    """Log a warning if states that differ between replicas were written by another number of these."""
    stored = {name.rpartition("/")[2] for name in manifest.tensors}
    names = sorted(name for name in getattr(optimizer, "replica_states", {}) if name in stored)
    if not names or optimizer.data_group.size == manifest.layout.data:
        return
    here, there = optimizer.data_group.size, manifest.layout.data
    errors = (
        "left out: one replica compresses nothing"
        if here == 1
        else f"divided among {here} replicas, with the same mean"
    )
    for is_mean, what in ((False, errors), (True, "each replica continues with their mean")):
        listed = [name for name in names if (optimizer.replica_states[name] == "mean") is is_mean]
        if listed:
            logger.warning("%s of the checkpoint's %d replicas: %s", " and ".join(listed), there, what)


def _served(fragment: Fragment, optimizer: Any) -> tuple[int, int]:
    """Return the first and the last element + 1 of this replica's part of a block, without padding rows."""
    group = optimizer.data_group
    length = part_length(fragment.held.holder.numel(), group.size)
    numel = fragment.held.numel
    return min(group.rank * length, numel), min((group.rank + 1) * length, numel)

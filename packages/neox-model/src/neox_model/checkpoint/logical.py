"""The model and its optimizer states as logical tensors: what this rank holds of each, and what it writes.

A fragment is a run of one logical weight on this rank. Its optimizer states lie at the same place of tensors
that the optimizer keeps beside the one that holds the weight, so one description serves all of them.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neox_model.checkpoint.blocks import Range
from neox_model.checkpoint.contents import Block, block_numel
from neox_model.checkpoint.engines import Held, adapter_of, scalar_device
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.shards import DTYPE_NAMES, DTYPES, Part
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import Logical, named_logical_parameters

__all__ = [
    "Fragment",
    "engine_fragments",
    "is_written_here",
    "model_fragments",
    "optimizer_parts",
    "restore_scalars",
    "state_tensor",
    "weight_part",
]


@dataclass(frozen=True, slots=True)
class Fragment:
    """A run of one logical weight on this rank, padding rows left out."""

    name: str
    logical: Logical
    held: Held

    @property
    def range(self) -> Range:
        """The run as a range of this rank's block."""
        return self.logical.slices, self.held.start, self.held.start + self.held.numel

    @property
    def is_whole(self) -> bool:
        """Whether the optimizer's tensor is the whole weight, in its shape."""
        holder = self.held.holder
        return tuple(holder.shape) == self.logical.shape and holder.numel() == self.held.numel

    @property
    def weight(self) -> Tensor:
        """The run's weights, float32 masters where there are any: one dimension, shares memory."""
        return self.part_of(self.held.holder)

    def part_of(self, tensor: Tensor) -> Tensor:
        """The run's elements of a tensor shaped as the holder: one dimension, shares memory."""
        return tensor.detach().view(-1).narrow(0, self.held.offset, self.held.numel)


def model_fragments(model: nn.Module) -> list[Fragment]:
    """The weights of a model without an engine, one fragment each."""
    return [
        fragment
        for name, param in named_logical_parameters(model)
        if (fragment := _clip(name, Held(param, 0, param.numel(), param, 0))) is not None
    ]


def engine_fragments(model: nn.Module, engine: Any) -> list[Fragment]:
    """The master weights that this rank holds, in the order of the optimizer."""
    names = {id(param): name for name, param in named_logical_parameters(model)}
    held = adapter_of(engine.optimizer).held(engine.optimizer)
    clipped = (_clip(names[id(run.param)], run) for run in held)
    return [fragment for fragment in clipped if fragment is not None]


def _clip(name: str, held: Held) -> Fragment | None:
    """Leave out the rows that padding adds behind the block; None when nothing is left."""
    logical: Logical = held.param.logical  # type: ignore[attr-defined]
    local_shape = tuple(getattr(held.param, "ds_shape", held.param.shape))
    block_shape = tuple(stop - start for start, stop in logical.slices)
    if local_shape[1:] != block_shape[1:]:
        raise CheckpointError(
            f"{name}: the local shape {local_shape} does not begin with the block {block_shape}"
        )
    numel = min(held.numel, block_numel(logical.slices) - held.start)
    if numel <= 0:
        return None
    return Fragment(name, logical, Held(held.param, held.start, numel, held.holder, held.offset))


def is_written_here(fragment: Fragment, groups: Groups, *, splits_over_data: bool) -> bool:
    """Whether this rank is the one of those that hold the same values that writes them.

    Replicas are spread over their ranks by a hash of the name. A tied weight is written by its owner's stage.
    """
    if getattr(fragment.held.param, "ds_pipe_replicated", False):
        return False
    turn = zlib.crc32(fragment.name.encode())
    writes_data = splits_over_data or turn % groups.data.size == groups.data.rank
    writes_model = (
        fragment.logical.model_parallel or turn // groups.data.size % groups.model.size == groups.model.rank
    )
    return writes_data and writes_model


def weight_part(fragment: Fragment) -> Part:
    """The weights of a fragment, as a part to write."""
    return _part(fragment, fragment.name, fragment.weight)


def optimizer_parts(fragment: Fragment, optimizer: Any) -> tuple[list[Part], dict[str, Any]]:
    """The optimizer's states of a fragment.

    Args:
        fragment: whose states.
        optimizer: the optimizer that keeps them, unwrapped.

    Returns:
        The states that are tensors, as parts named `NAME/STATE`: those with one value per element of the
        weight, and those of any other shape where this rank holds the whole weight; and the single-number
        states.

    Raises:
        CheckpointError: a state is none of these.
    """
    parts: list[Part] = []
    scalars: dict[str, Any] = {}
    for key, value in optimizer.state.get(fragment.held.holder, {}).items():
        name = f"{fragment.name}/{key}"
        if isinstance(value, Tensor) and value.shape == fragment.held.holder.shape and key != "step":
            parts.append(_part(fragment, name, fragment.part_of(value)))
        elif isinstance(value, Tensor) and value.dim() == 0:
            scalars[key] = {"value": value.item(), "dtype": DTYPE_NAMES[value.dtype]}
        elif isinstance(value, int | float | None):
            scalars[key] = {"value": value, "dtype": None}
        elif isinstance(value, Tensor) and fragment.is_whole:
            shape = tuple(value.shape)
            parts.append(
                Part(name=name, shape=shape, block=_whole(shape), start=0, values=value.detach().reshape(-1))
            )
        else:
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps the state {key!r} of {fragment.name} as {_kind(value)}: "
                "only a single number, one value per weight, or a state of a weight that is whole on a rank "
                "can be saved; set no-save-optim: true"
            )
    return parts, scalars


def _whole(shape: tuple[int, ...]) -> Block:
    return tuple((0, length) for length in shape)


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _part(fragment: Fragment, name: str, values: Tensor) -> Part:
    logical = fragment.logical
    return Part(
        name=name, shape=logical.shape, block=logical.slices, start=fragment.held.start, values=values
    )


def state_tensor(
    fragment: Fragment, optimizer: Any, key: str, shape: tuple[int, ...]
) -> tuple[Tensor, Range]:
    """Find the memory of one optimizer state, made when the optimizer does not have it yet.

    Args:
        fragment: of which weight.
        optimizer: the optimizer that keeps the state, unwrapped.
        key: the state's name.
        shape: its whole shape in the checkpoint.

    Returns:
        The fragment's part of the state, one dimension; and which range of the whole it is.

    Raises:
        CheckpointError: the state does not have one value per weight, and the weight is not whole here.
    """
    holder, state = fragment.held.holder, optimizer.state[fragment.held.holder]
    if shape == fragment.logical.shape:
        if key not in state:
            state[key] = torch.zeros_like(holder)
        return fragment.part_of(state[key]), fragment.range
    if not fragment.is_whole:
        raise CheckpointError(
            f"the state {key!r} of {fragment.name} belongs to the whole weight, and this rank holds a part; "
            "set model-parallel-size: 1 and zero_optimization.stage: 0, or no-load-optim: true"
        )
    if key not in state:
        state[key] = torch.zeros(shape, dtype=holder.dtype, device=holder.device)
    return state[key].view(-1), (_whole(shape), 0, state[key].numel())


def restore_scalars(
    fragments: list[Fragment], optimizer: Any, saved: Mapping[str, Mapping[str, Any]], *, same_class: bool
) -> None:
    """Put the single-number states back; all weights that share an optimizer tensor must agree.

    Args:
        fragments: this rank's.
        optimizer: the optimizer that keeps the states, unwrapped.
        saved: weight name to its states.
        same_class: whether this optimizer's class wrote them; if not, numbers take the form this class uses.

    Raises:
        CheckpointError: weights that share a tensor do not agree.
    """
    for holder, names in _names_by_holder(fragments):
        numbers = [saved.get(name, {}) for name in names]
        if any(number != numbers[0] for number in numbers):
            raise CheckpointError(
                f"the optimizer states of {', '.join(names)} counted different updates, which one flat "
                "partition cannot hold; set no-load-optim: true, or zero_optimization.stage: 0"
            )
        device = scalar_device(optimizer, holder)
        for key, number in numbers[0].items():
            number = number if same_class else _in_form_of(optimizer, number)
            optimizer.state[holder][key] = _scalar(number["value"], number["dtype"], device)


def _in_form_of(optimizer: Any, number: Mapping[str, Any]) -> Mapping[str, Any]:
    """Torch's own optimizers count in float32 tensors, DeepSpeed's in plain integers."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return {"value": number["value"], "dtype": "F32"}
    return {"value": int(number["value"]), "dtype": None}


def _names_by_holder(fragments: list[Fragment]) -> Iterator[tuple[Tensor, list[str]]]:
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for fragment in fragments:
        found.setdefault(id(fragment.held.holder), (fragment.held.holder, []))[1].append(fragment.name)
    yield from found.values()


def _scalar(value: Any, dtype: str | None, device: torch.device) -> Any:
    return value if dtype is None else torch.tensor(value, dtype=DTYPES[dtype], device=device)

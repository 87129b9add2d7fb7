"""Parameters with a description of the logical tensor that they are part of.

A model has one set of logical tensors (`layers.12.attention.qkv.weight`) in every layout. A rank's parameter
has, as `param.logical`, the whole shape, the block that it holds, and the initialization of the whole tensor;
initialization, checkpoints and optimizers need nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from neox_model.errors import LayoutError
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.partial_gradients import mark_partial

__all__ = [
    "InitMethod",
    "Logical",
    "LogicalState",
    "RowBlocks",
    "Writable",
    "begin_iteration",
    "blocks_of",
    "copy_description",
    "is_expert",
    "is_matrix",
    "is_stage_copy",
    "logical_parameter",
    "master_weight",
    "model_states",
    "named_logical_modules",
    "named_logical_parameters",
    "rows_of",
    "split_dim_of",
    "trained_names",
    "whole_shape_of",
    "without_memory",
]

InitMethod = Callable[[Tensor, torch.Generator], None]

# Yields the tensor to fill for a parameter, of its whole shape; None: other ranks fill it.
Writable = Callable[[nn.Parameter], AbstractContextManager[Tensor | None]]

# Device of new parameters; None for torch's default device.
_DEVICE: ContextVar[str | None] = ContextVar("device of new parameters", default=None)


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """How the rows of a matrix that is several matrices in one, such as query, key and value, are ordered.

    The pattern repeats until the last row: some blocks of the first matrix, some of the second, and so on.

    Args:
        counts: the number of blocks of each matrix in one repetition.
        height: the number of rows of a block, such as the width of a head.
    """

    counts: tuple[int, ...]
    height: int

    def split(self, matrix: Tensor) -> list[Tensor]:
        """Return the blocks of each matrix, by repetition: (repetitions, count, height, columns)."""
        blocks = matrix.view(-1, sum(self.counts), self.height, matrix.shape[-1])
        return list(blocks.split(self.counts, dim=1))

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """Return the rows in their order, given what `split` returns, in any shape."""
        columns = matrices[0].shape[-1]
        blocks = [
            matrix.reshape(-1, count, self.height, columns)
            for matrix, count in zip(matrices, self.counts, strict=True)
        ]
        return torch.cat(blocks, dim=1).flatten(0, 2)


@dataclass(frozen=True)
class Logical:
    """The logical tensor of a parameter.

    Attributes:
        shape: shape of the whole tensor, without padding.
        slices: the block that this rank holds, (start, stop) per dimension, clipped to `shape`. The local
            tensor may be longer along the split dimension: the additional rows are zero, masked wherever
            used, and never stored.
        init: fills the whole float32 tensor in place from a generator.
        split_dim: the dimension that is split over tensor-parallel ranks; None if each has a copy.
        blocks: the order of the rows of several matrices in one; None for one matrix.
        kind: a key of `RunSpec.multipliers`; None: a vector, or there are none.
        is_biases: each row is the bias of an expert, and the tensor no matrix.
        is_expert: its first dimension is that of experts, which data-parallel ranks divide.
    """

    shape: tuple[int, ...]
    slices: tuple[tuple[int, int], ...]
    init: InitMethod
    split_dim: int | None
    blocks: RowBlocks | None = None
    kind: str | None = None
    is_biases: bool = False
    is_expert: bool = False

    @property
    def model_parallel(self) -> bool:
        """Return True if the tensor is split over tensor-parallel ranks."""
        return self.split_dim is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalState:
    """A part of a state that belongs to the model and is no weight, such as a mask.

    A checkpoint contains it whole, like a weight. What has it changes `values` in place.

    Attributes:
        name: logical name; the last part of the name follows a slash.
        shape: shape of the whole state.
        slices: the block that this tensor-parallel rank holds.
        start: first element, row-major in the block.
        values: the elements, 1-D.
        is_split_over_model: other tensor-parallel ranks hold other blocks; False: they hold copies.
        is_split_over_data: other data-parallel ranks hold other elements of the block.
        is_expert: it belongs to experts that data-parallel ranks divide.
        is_stage_copy: it belongs to the copy of a tied weight, whose owner's stage writes it.
        if_missing: tensor to read instead from a checkpoint that lacks the state; None: that is refused.
    """

    name: str
    shape: tuple[int, ...]
    slices: tuple[tuple[int, int], ...]
    start: int
    values: Tensor
    is_split_over_model: bool
    is_split_over_data: bool = False
    is_expert: bool = False
    is_stage_copy: bool = False
    if_missing: str | None = None

    @property
    def range(self) -> tuple[tuple[tuple[int, int], ...], int, int]:
        """Return the block, and the first and last element + 1 in it."""
        return self.slices, self.start, self.start + self.values.numel()


def logical_parameter(
    shape: tuple[int, ...],
    *,
    init: InitMethod,
    group: Group = SINGLE_RANK,
    split_dim: int | None = None,
    pad: bool = False,
    blocks: RowBlocks | None = None,
    kind: str | None = None,
    is_biases: bool = False,
    is_partial: bool = False,
    experts: Group | None = None,
) -> nn.Parameter:
    """Return this rank's part of a logical tensor, uninitialized.

    Args:
        shape: shape of the whole tensor.
        init: fills the whole tensor.
        group: the ranks over which it is split.
        split_dim: the dimension that is split; None: every rank has a copy. If the group splits the sequence,
            gradients of copies are summed over the group, because each rank uses its part of the sequence
            (see parallel.partial_gradients).
        pad: add padding rows on the last ranks instead of refusing sizes that do not divide.
        blocks: the order of the rows of several matrices in one; None for one matrix.
        kind: see `Logical`; None: that of `init`.
        is_biases: see `Logical`.
        is_partial: each rank of the group has a copy, and computes a part of the gradient, also of a group
            that does not split the sequence.
        experts: the ranks that divide the first dimension, which is that of experts; None: it is another one.

    Raises:
        LayoutError: the split dimension is not divisible by the size of the group, and `pad` is False.
    """
    local_shape = list(shape)
    slices = [(0, length) for length in shape]
    if experts is not None:
        local_shape[0] = shape[0] // experts.size
        slices[0] = (experts.rank * local_shape[0], (experts.rank + 1) * local_shape[0])
    if split_dim is not None:
        length = shape[split_dim]
        if length % group.size and not pad:
            raise LayoutError(
                f"a width of {length:,} cannot be split over {group.size} tensor-parallel ranks; "
                f"set model-parallel-size to a divisor of the width"
            )
        local = -(-length // group.size)
        start = min(group.rank * local, length)
        local_shape[split_dim] = local
        slices[split_dim] = (start, min(start + local, length))
    parameter = nn.Parameter(torch.empty(local_shape, device=_DEVICE.get()))
    split = split_dim if group.size > 1 else None
    kind = kind or getattr(init, "kind", None)
    is_expert = experts is not None and experts.size > 1
    logical = Logical(tuple(shape), tuple(slices), init, split, blocks, kind, is_biases, is_expert)
    parameter.logical = logical  # type: ignore[attr-defined]
    if logical.model_parallel:
        # For DeepSpeed's norms: sum this parameter over ranks instead of counting it once.
        parameter.model_parallel = True  # type: ignore[attr-defined]
    if split_dim is None and (group.splits_sequence or (is_partial and group.size > 1)):
        mark_partial(parameter, group)
    return parameter


def master_weight(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter with the same data and the same logical tensor, if it has one."""
    master = nn.Parameter(parameter.data)
    if hasattr(parameter, "logical"):
        master.logical = parameter.logical  # type: ignore[attr-defined]
    return master


@contextmanager
def without_memory() -> Iterator[None]:
    """Within, new parameters have shapes and no memory (device meta); buffers are as always."""
    token = _DEVICE.set("meta")
    try:
        yield
    finally:
        _DEVICE.reset(token)


def copy_description(source: nn.Parameter, target: nn.Parameter, *, rows: tuple[int, int]) -> None:
    """Describe a parameter that holds some rows of another one like that one.

    Args:
        source: a parameter of `logical_parameter`, or a plain one, which has no description.
        target: receives the description.
        rows: the first row of `source` that it holds, and the one after its last.
    """
    for name in ("model_parallel", "is_stage_copy", "partial_gradient"):
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))
    logical: Logical | None = getattr(source, "logical", None)
    if logical is not None:
        (start, stop), *others = logical.slices or ((0, 1),)
        mine = min(start + rows[0], stop), min(start + rows[1], stop)
        target.logical = replace(logical, slices=(mine, *others))  # type: ignore[attr-defined]


def split_dim_of(parameter: Tensor) -> int | None:
    """Return the dimension along which tensor-parallel ranks split a parameter or master weight, or None."""
    logical: Logical | None = getattr(parameter, "logical", None)
    return None if logical is None else logical.split_dim


def whole_shape_of(parameter: Tensor) -> torch.Size:
    """Return the shape of the logical tensor of a parameter or master weight; its own if it has none."""
    logical: Logical | None = getattr(parameter, "logical", None)
    return parameter.shape if logical is None else torch.Size(logical.shape)


def rows_of(parameter: Tensor) -> tuple[int, int]:
    """Return the rows of the logical tensor that a parameter or master weight holds, as (start, stop)."""
    logical: Logical | None = getattr(parameter, "logical", None)
    return (0, len(parameter)) if logical is None else logical.slices[0]


def is_expert(parameter: Tensor) -> bool:
    """Return True for a parameter or master weight of experts that data-parallel ranks divide."""
    logical: Logical | None = getattr(parameter, "logical", None)
    return logical is not None and logical.is_expert


def blocks_of(parameter: Tensor) -> RowBlocks | None:
    """Return the order of rows of a parameter or master weight that is several matrices in one, or None."""
    logical: Logical | None = getattr(parameter, "logical", None)
    return None if logical is None else logical.blocks


def is_matrix(parameter: Tensor) -> bool:
    """Return True for a matrix, or several, also if this rank holds it in another shape."""
    logical: Logical | None = getattr(parameter, "logical", None)
    return len(whole_shape_of(parameter)) >= 2 and (logical is None or not logical.is_biases)


def is_stage_copy(parameter: Tensor) -> bool:
    """Return True for a tied weight whose owner is another pipeline stage, which marked it."""
    return getattr(parameter, "is_stage_copy", False)


def named_logical_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (logical name, parameter) for each parameter of this rank; tied ones once, by their owner's name.

    The attribute `plan_names` of a built model maps its paths to logical names (empty or missing if they are
    the same).
    """
    renamed: dict[str, str] = getattr(model, "plan_names", {})
    for path, parameter in model.named_parameters():
        yield _logical_name(path, renamed), parameter


def named_logical_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (logical name, module) for each module of this rank."""
    renamed: dict[str, str] = getattr(model, "plan_names", {})
    for path, module in model.named_modules():
        yield _logical_name(path, renamed), module


def model_states(model: nn.Module) -> list[LogicalState]:
    """Return the states of modules of this rank that are no weights: of those with `logical_states(name)`."""
    found: list[LogicalState] = []
    for name, module in named_logical_modules(model):
        states_of = getattr(module, "logical_states", None)
        if states_of is not None:
            found += states_of(name)
    return found


def begin_iteration(model: nn.Module, iteration: int) -> None:
    """Prepare the forward passes of modules that have `begin_iteration`, for an iteration counted from 0.

    That of a model with the weights of a checkpoint is the checkpoint's. Collective over these modules.
    """
    for module in model.modules():
        begin = getattr(module, "begin_iteration", None)
        if begin is not None:
            begin(iteration)


def trained_names(model: nn.Module) -> Iterator[str]:
    """Yield the logical name of each parameter of this rank that is trained, which checkpoints contain."""
    return (name for name, parameter in named_logical_parameters(model) if parameter.requires_grad)


def _logical_name(path: str, renamed: dict[str, str]) -> str:
    """Replace the longest known prefix of `path`: with {"3": "layers.2"}, "3.w" becomes "layers.2.w"."""
    prefix = path
    while prefix:
        if prefix in renamed:
            return renamed[prefix] + path[len(prefix) :]
        prefix = prefix.rpartition(".")[0]
    return path

"""Enter and leave split matrices, with or without sequence parallelism.

Every tensor-parallel rank computes the layers between split matrices (norms, dropout, residuals). With a
group that splits the sequence, each rank computes them for its part only: an all-gather before and a
reduce-scatter after the split matrices replace the all-reduce, with the same amount of communication, and the
activations in between take 1 / ranks of the memory. Gradients of parameters that every rank holds are summed
(see `logical_parameter`), and dropout differs between the ranks. For the backward pass a rank keeps its part
of the input, and gathers the whole again (unless `Group.keeps_gathered`).

Source: arXiv:2205.05198, section 4.2.2.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from neox_model.parallel.collectives import (
    copy_to_group,
    gather_to_group,
    reduce_from_group,
    reduce_scatter_from_group,
    start_all_gather,
)
from neox_model.parallel.compile_disabled import CompileDisabled
from neox_model.parallel.groups import Group
from neox_model.parallel.random import in_split_stream, split_stream

__all__ = [
    "COMPILE_DISABLED",
    "BiasDropoutAdd",
    "TPInput",
    "from_row_parallel",
    "gather_input",
    "gather_inputs",
    "own_rows",
    "sequence_stream",
    "to_column_parallel",
    "with_own_dropout",
]

# (x, bias or None, residual, probability, training) -> residual + dropout(x + bias)
BiasDropoutAdd = Callable[[Tensor, Tensor | None, Tensor, float, bool], Tensor]


def to_column_parallel(hidden: Tensor, group: Group) -> Tensor:
    """Return the input of a column-parallel matrix: the whole sequence (dimension 0), gradients summed."""
    return gather_to_group(hidden, group) if group.splits_sequence else copy_to_group(hidden, group)


class TPInput:
    """The input of column-parallel matrices, which enters the split once for all of them.

    Args:
        whole: the input on every rank, for the whole sequence. Its gradients, from all matrices, are summed
            over the ranks together.
        rows: the input before it entered; this rank's part of the sequence if the group splits it.
        reduces: sum the partial results of the row-parallel matrix behind these; False: the caller does.
        again: what the backward pass gathers again; None: `whole` is kept.
        part: the columns of what is gathered again that are `whole`.

    Attributes:
        adds_gradients: the matrix products sum the gradients of the input themselves (addmm); False: autograd
            sums them, with one more kernel. True computes the gradients of input and weight in one function:
            not for pipeline schedules that compute them at different times.
    """

    def __init__(
        self,
        whole: Tensor,
        rows: Tensor,
        *,
        reduces: bool = True,
        again: "_GatheredAgain | None" = None,
        part: slice = slice(None),
    ) -> None:
        self.whole = whole
        self.rows = rows
        self.reduces = reduces
        self._again = again
        self._part = part
        self.adds_gradients = False

    def product(self, whole: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product of `whole` with a matrix, as torch's `linear`.

        `whole` is that of this tp_input, or what a hook of the module that received it returned in its place.
        """
        if self._again is not None:
            return self._gathering_product(self._again, whole, weight, bias)
        is_plain = not self.adds_gradients or torch.compiler.is_compiling()
        if is_plain or whole is not self.whole or _autocast_dtype(whole) is not None:
            return functional.linear(whole, weight, bias)
        product: Tensor
        self.whole, product = _AddingProduct.apply(whole, weight, bias)
        return product

    def _gathering_product(
        self, again: "_GatheredAgain", whole: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        rows, dtype = again.rows, _autocast_dtype(whole)
        if dtype is not None:
            # Autocast does not affect functions that compute their own gradients.
            whole, rows, weight = whole.to(dtype), rows.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        product: Tensor = _product(whole, rows, weight, bias, again.gathering, self._part)
        return product


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes products with the tensor; None without autocast."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


class _Gathering:
    """Gathers the whole of a sequence once for the backward passes of all products with it.

    It does not hold this rank's part: autograd frees what it saved itself, and nothing else, after the
    backward pass.

    Attributes:
        group: the ranks that have the parts.
        uses: number of products whose backward pass needs the whole.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.uses = 0
        self._left = 0
        self._wait: Callable[[], Tensor] | None = None

    def start(self, rows: Tensor) -> Callable[[], Tensor]:
        """Start to gather, unless an earlier product has; return a function that returns the whole."""
        wait = start_all_gather(rows, self.group) if self._wait is None else self._wait
        self._left = (self._left or self.uses) - 1
        self._wait = wait if self._left else None
        return wait


@dataclass(frozen=True, slots=True)
class _GatheredAgain:
    """This rank's part of a sequence, which is kept, and what gathers the whole."""

    rows: Tensor
    gathering: _Gathering


class _AddingProduct(torch.autograd.Function):
    """Returns the input and its product with a matrix; adds the gradient that arrives at the input."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        # Only the gradient of the matrix is computed from the input.
        ctx.save_for_backward(whole if ctx.needs_input_grad[1] else None, weight)
        ctx.set_materialize_grads(False)
        return whole, functional.linear(whole, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, of_whole: Tensor | None, gradient: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if gradient is None:
            return of_whole, None, None
        whole, weight = ctx.saved_tensors
        needs_whole, needs_weight, needs_bias = ctx.needs_input_grad
        flat = gradient.flatten(0, -2)
        if not needs_whole:
            of_whole = None
        elif of_whole is None:
            of_whole = gradient @ weight
        else:
            of_whole = torch.addmm(of_whole.flatten(0, -2), flat, weight).view_as(of_whole)
        of_weight = flat.t() @ whole.flatten(0, -2) if needs_weight else None
        return of_whole, of_weight, flat.sum(dim=0) if needs_bias else None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        whole: Tensor,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gathering: _Gathering,
        part: slice,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.gathering, ctx.part = gathering, part
        _, _, needs_weight, *_ = ctx.needs_input_grad
        gathering.uses += needs_weight
        return functional.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_whole, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        # The other gradient is computed while the message is under way.
        wait = ctx.gathering.start(rows) if needs_weight else None
        of_whole = gradient @ weight if needs_whole else None
        flat = gradient.flatten(0, -2)
        of_weight = None if wait is None else flat.t() @ wait()[..., ctx.part].flatten(0, -2)
        of_bias = flat.sum(dim=0) if needs_bias else None
        return of_whole, None, of_weight, of_bias, None, None


_product = CompileDisabled(_Product.apply)
COMPILE_DISABLED = (_product,)


def gather_input(hidden: Tensor, group: Group) -> TPInput:
    """Enter the split with the input of one or several column-parallel matrices."""
    whole = to_column_parallel(hidden, group)
    return TPInput(whole, hidden, again=_gathered_again(hidden, group))


def gather_inputs(inputs: Sequence[Tensor], group: Group, *, reduces: bool) -> list[TPInput]:
    """Enter the split with several inputs of one shape, this rank's parts of the sequence, in one message."""
    width = inputs[0].shape[-1]
    rows = torch.cat(list(inputs), dim=-1)
    whole, again = gather_to_group(rows, group), _gathered_again(rows, group)
    parts = [slice(place * width, (place + 1) * width) for place in range(len(inputs))]
    return [
        TPInput(whole[..., part], given, reduces=reduces, again=again, part=part)
        for given, part in zip(inputs, parts, strict=True)
    ]


def _gathered_again(rows: Tensor, group: Group) -> _GatheredAgain | None:
    if not group.splits_sequence or group.keeps_gathered:
        return None
    return _GatheredAgain(rows.detach(), _Gathering(group))


def from_row_parallel(partial_sums: Tensor, group: Group) -> Tensor:
    """Return the sum of the ranks' partial results, only this rank's part if the group splits the sequence.

    `partial_sums` may be overwritten: pass a contiguous tensor that nothing else references.
    """
    if group.splits_sequence:
        return reduce_scatter_from_group(partial_sums, group)
    return reduce_from_group(partial_sums, group)


def own_rows(tensor: Tensor, group: Group) -> Tensor:
    """Return this rank's part (dimension 0) of a replicated tensor without gradient."""
    return tensor.chunk(group.size)[group.rank] if group.splits_sequence else tensor


@contextmanager
def sequence_stream(group: Group, device: torch.device) -> Iterator[None]:
    """Within this context, random numbers differ between ranks with different parts of the sequence."""
    if not group.splits_sequence:
        yield
        return
    with split_stream(group, device):
        yield


def with_own_dropout(add: BiasDropoutAdd, group: Group) -> BiasDropoutAdd:
    """Return `add` with different dropout on each rank if the group splits the sequence."""
    return partial(_add_with_own_dropout, add, group) if group.splits_sequence else add


def _add_with_own_dropout(
    add: BiasDropoutAdd,
    group: Group,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    probability: float,
    training: bool,
) -> Tensor:
    if not training or probability == 0.0:
        return add(x, bias, residual, probability, training)
    return in_split_stream(group, x.device, partial(add, x, bias, residual, probability, training))

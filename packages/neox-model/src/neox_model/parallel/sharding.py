"""Parameters partitioned over data-parallel ranks by torch's `fully_shard` (ZeRO stages 1 to 3).

Between updates each rank holds a run of rows of every parameter, in float32. A layer's whole parameters, in
the dtype of the computation, exist while it runs; at stages 1 and 2 from its forward to its backward pass.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from neox_model.parallel.groups import Group, Groups
from neox_model.parallel.logical import copy_description, is_expert
from neox_model.parallel.param_shard import ParamShard, first_row
from neox_model.parallel.partitioned import is_sharded
from neox_model.torch_compat import reduce_scatter_single

__all__ = [
    "MeanReduceScatter",
    "Precisions",
    "ShardedModel",
    "partition",
]


# Name of a method of partitioned models.
_EMPTY_PASS = "empty_pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Precisions:
    """The data types of sharded parameters, which are float32 between updates.

    Args:
        computation: dtype of the whole parameters.
        accumulation: dtype of whole gradients before they are reduced.
    """

    computation: torch.dtype
    accumulation: torch.dtype


class MeanReduceScatter:
    """Averages gradients over ranks, each of which receives a part: a `ReduceScatter` of `fully_shard`.

    Args:
        dtype: dtype of the messages.
        size: number of ranks.
        divides_first: divide by the number of ranks before the sum instead of after it.
        predivide_factor: divide by this factor before the sum, and by the remaining factor after it.
    """

    def __init__(
        self, dtype: torch.dtype, *, size: int, divides_first: bool, predivide_factor: float = 1.0
    ) -> None:
        self._dtype = dtype
        self._before = float(size) if divides_first else predivide_factor
        self._after = size / self._before

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the mean of the inputs to the output."""
        if self._before != 1.0:
            input_tensor.div_(self._before)
        sent = input_tensor.to(self._dtype)
        is_same = output_tensor.dtype == self._dtype
        received = output_tensor if is_same else torch.empty_like(output_tensor, dtype=self._dtype)
        reduce_scatter_single(received, sent, group=group)
        if not is_same:
            output_tensor.copy_(received)
        if self._after != 1.0:
            output_tensor.div_(self._after)


def partition(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    experts: Sequence[nn.Module] = (),
    groups: Groups,
    device: torch.device,
    precisions: Precisions,
    reshards_after_forward: bool | int,
    partitions_frozen: bool,
) -> None:
    """Partition the parameters of a model over the data-parallel ranks. Collective.

    Args:
        model: its parameters are float32, on the device or without memory (`without_memory`). The rows of
            those without memory are allocated, uninitialized.
        blocks: modules that run one after the other, of which each is gathered by itself; those that share
            parameters with others are gathered with the whole model.
        experts: parts of the blocks whose parameters are experts that data-parallel ranks divide.
        groups: this job's process groups, with at least two data-parallel ranks.
        device: device of the model.
        precisions: the data types.
        reshards_after_forward: free whole parameters between the forward and the backward pass; a number:
            keep a part for this many ranks; False: keep them.
        partitions_frozen: partition the weights that are not trained, too.
    """
    before = dict(model.named_parameters())
    for parameter in before.values():
        if not parameter.requires_grad:
            # No update refers to them: they have no float32 values.
            parameter.data = parameter.data.to(precisions.computation)
    frozen = {parameter for parameter in before.values() if not parameter.requires_grad}
    settings: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=precisions.computation,
            reduce_dtype=precisions.accumulation,
            cast_forward_inputs=False,
        ),
        "ignored_params": None if partitions_frozen else frozen,
    }
    for part in experts:
        # A part for each of some neighbouring ranks is not kept: these have other experts.
        frees = bool(reshards_after_forward)
        copies = groups.copies_of(is_expert=True)
        fully_shard(part, mesh=_mesh(copies, device), reshard_after_forward=frees, **settings)
    settings["mesh"] = _mesh(groups.data, device)
    for block in _without_shared(model, blocks):
        fully_shard(block, reshard_after_forward=reshards_after_forward, **settings)
    # What remains is used at both ends of the model: it stays until the backward pass in any case.
    fully_shard(model, reshard_after_forward=False, **settings)
    _allocate(model, device)
    for path, parameter in model.named_parameters():
        copy_description(before[path], parameter, rows=(0, len(parameter)))


def _mesh(group: Group, device: torch.device) -> DeviceMesh:
    assert group.process_group is not None, "sharding requires torch.distributed"
    return DeviceMesh.from_group(group.process_group, device.type)


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Replace parameters without memory, and move buffers; shared parameters stay shared.

    `nn.Module.to` would take the descriptions of partitioned parameters away.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, buffer.to(device))
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_meta:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(
                    _uninitialized(parameter, device), requires_grad=parameter.requires_grad
                )
            setattr(module, name, made[id(parameter)])


def _uninitialized(parameter: nn.Parameter, device: torch.device) -> Tensor:
    if not isinstance(parameter, DTensor):
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    with torch.no_grad():
        local = torch.empty_like(parameter.to_local(), device=device)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class ShardedModel:
    """A partitioned model that is trained.

    Args:
        model: partitioned by `partition`, with its initial weights.
        groups: this job's process groups.
        reduction: averages gradients over the ranks of a group.
        keeps_weights: whole parameters stay from the first micro-batch of an update to the last.
        reduces_every_time: reduce the gradients of each micro-batch, so that only their parts are stored.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        groups: Groups,
        reduction: Callable[[int], MeanReduceScatter],
        keeps_weights: bool,
        reduces_every_time: bool,
    ) -> None:
        self.model = model
        self._keeps_weights, self._experts = keeps_weights, groups.experts.size
        self._reduces_every_time = reduces_every_time
        self._parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for part in self._parts:
            # The reduction divides.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            has_experts = all(is_expert(parameter) for parameter in part.parameters())
            copies = groups.copies_of(is_expert=has_experts)
            part.set_custom_reduce_scatter(reduction(copies.size))  # type: ignore[arg-type]
        self._add_empty_pass()
        self._initialize()
        self._holders: dict[int, nn.Parameter] = {}
        self._held: dict[int, ParamShard] = {}
        for parameter in model.parameters():
            if is_sharded(parameter):
                holder, held = _held(parameter)
                self._holders[id(parameter)] = holder
                self._held[id(holder)] = held

    def _add_empty_pass(self) -> None:
        """Give the whole model a forward method of `fully_shard` that computes nothing."""
        setattr(self.model, _EMPTY_PASS, Tensor.clone)
        register_fsdp_forward_method(self.model, _EMPTY_PASS)

    def run_empty_pass(self) -> Tensor:
        """Let `fully_shard` do what it does around a forward pass; the result is for a backward pass."""
        device = next(self.model.parameters()).device
        result: Tensor = getattr(self.model, _EMPTY_PASS)(torch.zeros((), device=device, requires_grad=True))
        return result

    @torch.no_grad()
    def _initialize(self) -> None:
        """Let `fully_shard` prepare the whole model now instead of in its first forward pass.

        Otherwise a layer that runs before the whole model does is initialized as a separate root module, and
        parameters are replaced after their holders were made. Collective.
        """
        self.run_empty_pass()
        self._parts[0].reshard()

    def holder_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor with this rank's rows of a parameter, in float32."""
        return self._holders[id(parameter)]

    def param_shards_of(self, holders: Sequence[nn.Parameter]) -> Iterator[ParamShard]:
        """Yield what each of these holders has."""
        return (self._held[id(holder)] for holder in holders)

    def begin(self, *, is_last: bool) -> None:
        """Prepare the next micro-batch of an update.

        Args:
            is_last: whether it is the last one, after which gradients are reduced.
        """
        root = self._parts[0]
        reduces = is_last or self._reduces_every_time
        root.set_requires_gradient_sync(reduces)
        root.set_is_last_backward(is_last)
        if self._keeps_weights:
            root.set_reshard_after_backward(is_last)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move the gradients of this rank's runs to their holders."""
        for held in self._held.values():
            gradient = held.param.grad
            held.holder.grad = None if gradient is None else gradient.to_local()  # type: ignore[attr-defined]
            if held.holder.grad is not None and is_expert(held.param):
                # It is a sum over the ranks that divide experts.
                held.holder.grad.div_(self._experts)
            held.param.grad = None

    def release(self) -> None:
        """Free whole parameters, which do not follow a change of this rank's runs."""
        for part in self._parts:
            part.reshard()


def _without_shared(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield the blocks whose parameters are in no other part of the model."""
    inside = {id(module) for block in blocks for module in block.modules()}
    others = [module for module in model.modules() if id(module) not in inside]
    uses = Counter(id(parameter) for block in blocks for parameter in block.parameters())
    uses.update(id(parameter) for module in others for parameter in module.parameters(recurse=False))
    for block in blocks:
        own = [uses[id(parameter)] for parameter in block.parameters()]
        if own and max(own) == 1:
            yield block


def _held(parameter: nn.Parameter) -> tuple[nn.Parameter, ParamShard]:
    """Return this rank's rows of a sharded parameter as a plain one, and where they belong."""
    with torch.no_grad():
        local, mesh = parameter.to_local(), parameter.device_mesh  # type: ignore[attr-defined]
    rows = len(parameter)
    first = first_row(rows, rank=mesh.get_local_rank(), size=mesh.size())
    holder = nn.Parameter(local.detach(), requires_grad=parameter.requires_grad)
    copy_description(parameter, holder, rows=(first, first + len(local)))
    row_size = parameter.numel() // max(1, rows)
    return holder, ParamShard(parameter, first * row_size, local.numel(), holder, 0, tuple(parameter.shape))

"""The contract of an engine: what the rest of the program may use of one.

An engine holds the model, runs forward and backward, and updates the weights. There are two: torch's own
parts (`torch_engine.py`, `torch_pipeline.py`) and DeepSpeed's (`deepspeed/engines.py`). What an engine offers
at which ZeRO stage is declared in `neox_config.facts.engines`; rules refuse settings that require more, such
as `Update.before` under DeepSpeed's ZeRO.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from neox_model.parallel.param_shard import ParamShard

__all__ = [
    "BeforeUpdate",
    "Engine",
    "ForwardEngine",
    "IsStopping",
    "Measure",
    "MicroBatch",
    "PendingUpdate",
    "Update",
    "never",
]

# Inputs of the model, and (labels_BS, loss_mask_BS), whose mask has the weights of tokens in the loss.
MicroBatch = tuple[Tensor | tuple[Tensor, ...], tuple[Tensor, Tensor]]

# Returns whether to end an evaluation early, the same on all ranks, which call it together.
IsStopping = Callable[[], bool]

# Returns a context manager around a phase of a step: see `Engine.measure_phases`.
Measure = Callable[[str], AbstractContextManager[object]]


def never() -> bool:
    """Return False: nothing ends the evaluation early."""
    return False


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An update whose gradients are averaged over data-parallel ranks, but neither clipped nor applied.

    An optimizer that averages over replicas itself (`MixedPrecisionOptimizer.averages_itself`) receives each
    replica's own gradients. Then the norms are root mean squares over replicas.

    Under ZeRO each data-parallel rank has a part of every gradient: what is collective over some groups is
    collective over the data group, too.

    Args:
        norm: 2-norm of all gradients, without the loss scale.
        tensor_norms: computes the 2-norm of each whole logical tensor's gradient, without the loss scale, by
            name, for the tensors of this rank's pipeline stage. Collective over the model group. Call
            it before the function that received this returns, and do not keep it. Collective over the data
            group, too, if the optimizer averages over replicas.
        weights: yields this rank's part of each weight that has a gradient, as logical name, values before
            the update, and gradient without the loss scale; the same rules. A weight that is not trained
            yet, such as a score of pruning, has none.
        norm_of: computes the 2-norm over the whole model of tensors like the gradients, by logical name.
            Collective over the model and pipe groups.
        tensor_zeros: computes the share of elements equal to 0 of each whole logical tensor's gradient, as
            `tensor_norms` does the norms.
        zeros: computes the share of gradient elements equal to 0 over the whole model.
            Collective over the model and pipe groups.
        loss: computes the mean loss of the update's micro-batches over data-parallel ranks, the same on every
            rank. Collective over all ranks.
        leave_out: leaves the update out, as if a gradient were not finite, if a boolean scalar on the device
            is true; it must be the same on all ranks. The loss scale does not change.
    """

    norm: Tensor
    tensor_norms: Callable[[], dict[str, Tensor]]
    weights: Callable[[], Iterator[tuple[str, Tensor, Tensor]]]
    norm_of: Callable[[Mapping[str, Tensor]], Tensor]
    tensor_zeros: Callable[[], dict[str, Tensor]]
    zeros: Callable[[], Tensor]
    loss: Callable[[], Tensor]
    leave_out: Callable[[Tensor], None]


BeforeUpdate = Callable[[PendingUpdate], None]


class Update(Protocol):
    """The update of an engine: the result of the last one, the seam before the next, and the states.

    Attributes:
        splits_over_data: True if each data-parallel rank holds a different part of the master weights (ZeRO).
        min_loss_scale: lower bound of the loss scale; None if the loss is not scaled.
    """

    splits_over_data: bool
    min_loss_scale: float | None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that has the states; their keys are the holders of `held`."""

    @property
    def grad_norm(self) -> Tensor | float | None:
        """The 2-norm of the last update's gradients before clipping; None before any update."""

    @property
    def skipped(self) -> Tensor | bool:
        """True if the last update was skipped: a gradient or the loss was not finite, or it was left out."""

    @property
    def loss_scale(self) -> Tensor | float | None:
        """The loss scale of the next backward pass; None if the loss is not scaled."""

    def before(self, call: BeforeUpdate) -> None:
        """Call the function before every update from now on.

        It reads nothing back from the device, unless the configuration requests copies in host memory.
        """

    def param_shards(self) -> Iterator[ParamShard]:
        """Yield the master weights that this rank holds, in the order of the optimizer, `in_memory`."""

    def in_memory(self, *, changes: bool = False) -> AbstractContextManager[None]:
        """Have the master weights and their states in memory for a block, wherever they are between updates.

        Args:
            changes: the block may change them.
        """

    def to_model(self) -> None:
        """Copy the master weights into the model's weights. Collective."""

    def with_shared_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes with the weights that all replicas have.

        A checkpoint contains these. They are other ones only between two averages of an optimizer whose
        replicas take steps alone.
        """


class ForwardEngine(Protocol):
    """A model that is evaluated."""

    def evaluate(
        self, micro_batches: Iterator[MicroBatch], count: int, is_stopping: IsStopping = never
    ) -> Tensor:
        """Return the mean loss over the tokens of `count` micro-batches, of all data-parallel ranks.

        It is the sum of the micro-batches' losses over that of the weights of their tokens, which are their
        masks; NaN if all of these are 0. Collective.

        `is_stopping` is asked after each micro-batch, or after each few that a pipeline computes together. If
        it returns True, the mean is that of the micro-batches so far.
        """


class Engine(ForwardEngine, Protocol):
    """A model that is trained."""

    @property
    def model(self) -> nn.Module:
        """The module inside the engine."""

    @property
    def device(self) -> torch.device:
        """The device of the model and of the micro-batches."""

    @property
    def update(self) -> Update:
        """The update of the model's weights."""

    def train_batch(self, micro_batches: Iterator[MicroBatch]) -> Tensor:
        """Run forward and backward on the micro-batches of one update, and the update. Collective.

        Stages of a pipeline other than the first and the last may receive no micro-batches.

        Returns:
            The mean loss over micro-batches and data-parallel ranks, the same on every rank.
        """

    def measure_phases(self, measure: Measure) -> None:
        """Put every phase of `train_batch` into the context manager that `measure` returns, from now on.

        The phases are `data` (waiting for micro-batches), `forward`, `backward_inner` (without the reduction
        over data-parallel ranks), `backward_allreduce` (that reduction; what overlaps with the backward pass
        counts as backward_inner), `step` (clipping and the optimizer) and `pipeline` (sending to other
        stages, and waiting for them). A phase may be inside another. Each of several calls measures.
        """

    def forget_shapes(self) -> None:
        """Accept another sequence length in the next batch."""

    def computing_weights(self) -> Iterator[ParamShard]:
        """Yield the weights that the model computes with, each its own holder; none that ZeRO partitions."""

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's counters and its loss scale, if that changes, as plain values."""

    def missing_counters(self, state: Mapping[str, Any]) -> set[str]:
        """Return the counters that `load_state_dict` requires and a state lacks."""

    def load_state_dict(self, state: Mapping[str, Any], *, loss_scale: bool) -> None:
        """Restore the counters, and the loss scale if requested; skip what this engine does not have."""

"""One optimizer update in any precision: reduce, unscale and clip gradients, then apply or skip the update.

If the model computes in 16 bit, the optimizer updates float32 master weights, and the 16-bit weights are
copies of them. If the optimizer can skip an update itself, nothing here waits for the device: the norm, the
loss scale, the number of applied updates and the learning rate are device tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce, broadcast, get_global_rank
from torch.nn import Parameter
from torch.optim import Optimizer

from neox_model.optim.gradient_norm import global_gradient_norm, norm_over_replicas
from neox_model.optim.loss_scale import LossScale
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.gradient_reduction import EarlyReduction, GradientReduction
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import is_expert, master_weight
from neox_model.parallel.partial_gradients import (
    has_partial_gradient,
    sum_partial_gradients,
    take_over_sums,
)
from neox_model.torch_compat import foreach_copy_, foreach_mul_, skip_on_device

__all__ = ["BeforeStep", "MixedPrecisionOptimizer", "Tie", "guard_loss", "skips_on_device"]

# Dtypes in which gradients are summed and weights updated; float64 only to verify a layout.
_WIDE = (torch.float32, torch.float64)
Tie = tuple[Parameter, ProcessGroup]
# Averages gradients in place.
Reduce = Callable[[Sequence[Tensor]], None]
# A function of the parameters, their gradients and the norm of all gradients, each with the loss scale.
BeforeStep = Callable[[Sequence[Parameter], Sequence[Tensor], Tensor], None]


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return True if the optimizer accepts `found_inf` and the learning rate as device tensors.

    torch's fused Adam and AdamW do. For all other optimizers the host reads `found_inf` once per update.
    (torch's fused SGD accepts it too, but leaves its momentum uninitialized if the first update is skipped.)
    """
    is_adam = isinstance(optimizer, torch.optim.Adam)
    return is_adam and all(bool(group.get("fused")) for group in optimizer.param_groups)


class MixedPrecisionOptimizer:
    """Wraps an optimizer so that one call of `step` is a whole update of the run.

    Args:
        optimizer: over the model's float32 parameters. Its groups are changed to contain the master weights.
        schedule: schedule of its learning rate; advanced by every applied update.
        dtype: dtype of the model's computation. If it is not float32, the parameters are cast to it and their
            float32 values become the master weights.
        accumulation_dtype: dtype in which gradients are summed over micro-batches; `dtype` or float32.
        max_norm: gradients are clipped to this 2-norm; 0 disables clipping.
        reduce: averages gradients over data-parallel ranks, in place, unless the optimizer averages.
        reduce_experts: the same for gradients of experts that ranks divide; None: there are none.
        groups: this rank's process groups.
        loss_scale: the loss scale; None if the loss is not scaled.
        ties: weights with copies on other pipeline stages, each with the group that sums its gradients.
        is_sharded: each data-parallel rank updates another part of every weight.

    Attributes:
        param_groups: the wrapped optimizer's parameter groups.
        before_update: called, in order, before gradients are clipped and applied; may call `leave_out`.
        norm: 2-norm of the last update's gradients before clipping, without the loss scale (see also
            `averages_itself`).
        found_inf: 1 if the last update was skipped, because the norm was not finite or it was left out, or 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: LearningRateSchedule,
        *,
        dtype: torch.dtype,
        accumulation_dtype: torch.dtype,
        max_norm: float,
        reduce: Reduce,
        reduce_experts: Reduce | None = None,
        groups: Groups,
        loss_scale: LossScale | None = None,
        ties: Sequence[Tie] = (),
        is_sharded: bool = False,
    ) -> None:
        self.is_sharded = is_sharded
        self.optimizer = optimizer
        self.schedule = schedule
        self.loss_scale = loss_scale
        self.before_update: list[BeforeStep] = []
        self.norm: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._left_out: Tensor | None = None
        self._max_norm = max_norm
        self._reduce, self._reduce_experts = reduce, reduce_experts or reduce
        self._groups = groups
        self.parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.masters = self.parameters if dtype in _WIDE else self._make_masters(dtype)
        pairs = list(zip(self.parameters, self.masters, strict=True))
        master_of = {id(parameter): master for parameter, master in pairs}
        self._ties = [(parameter, master_of[id(parameter)], group) for parameter, group in ties]
        self._sums_in_masters = self.masters is not self.parameters and accumulation_dtype in _WIDE
        if self._sums_in_masters:
            for parameter, master in pairs:
                parameter.register_post_accumulate_grad_hook(_move_gradient_to(master))
        take_over_sums(self.parameters)
        self._partial = [pair for pair in pairs if has_partial_gradient(pair[0])]
        self._experts = {id(parameter) for parameter in self.parameters if is_expert(parameter)}
        self._early: EarlyReduction | None = None
        if skips_on_device(optimizer):
            schedule.move_to(self.parameters[0].device)

    def reduce_early(self, reduction: GradientReduction, order: Iterable[Parameter]) -> None:
        """Average gradients with this reduction, from now on also during backward passes (`begin_last_pass`).

        Those that are summed over other ranks first are averaged at the start of the update.

        Args:
            reduction: averages gradients.
            order: the model's parameters in the order in which it uses them.
        """
        later = {id(parameter) for parameter, *_ in (*self._partial, *self._ties)}
        later |= self._experts
        holders = self.masters if self._sums_in_masters else self.parameters
        holder_of = {id(one): holder for one, holder in zip(self.parameters, holders, strict=True)}
        early = [one for one in order if id(one) in holder_of and id(one) not in later]
        self._early = EarlyReduction(reduction, early, [holder_of[id(one)] for one in early])
        self._reduce = self._early

    def begin_last_pass(self) -> None:
        """Prepare the last backward pass of an update, after which gradients are final."""
        if self._early is not None and not self.averages_itself:
            self._early.begin()

    def measure_reduction(self, measure: Callable[[str], AbstractContextManager[object]]) -> None:
        """Put every reduction over data-parallel ranks into `measure("backward_allreduce")` from now on."""

        def measured(reduce: Reduce, gradients: Sequence[Tensor]) -> None:
            with measure("backward_allreduce"):
                reduce(gradients)

        self._reduce = partial(measured, self._reduce)
        self._reduce_experts = partial(measured, self._reduce_experts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def averages_itself(self) -> bool:
        """Return True if each replica gives its own gradients to the optimizer, which averages over replicas.

        Then the norm of the update, by which all replicas clip, is the root of the mean over replicas of
        the squared norm of their gradients. If it is not finite on one rank, it is not on any.
        """
        return getattr(self.optimizer, "averages_itself", False)

    @torch.no_grad()
    def step(self) -> None:
        """Apply one update with the accumulated gradients, and delete these. Collective over all ranks."""
        self._sum_parts()
        self._sum_over_stages()
        pairs = list(zip(self.parameters, self.masters, strict=True))
        trained = [pair for pair in pairs if _gradient(*pair) is not None]
        if not self.averages_itself:
            self._average(trained)
            self._equalize_ties()
        gradients = [self._master_gradient(*pair) for pair in trained]
        parameters = [parameter for parameter, _ in trained]
        scaled_norm = global_gradient_norm(parameters, gradients, self._groups, are_sharded=self.is_sharded)
        if self.averages_itself:
            scaled_norm = norm_over_replicas(scaled_norm, self._groups.data)
        for call in self.before_update:
            call(parameters, gradients, scaled_norm)
        self._scale(gradients, scaled_norm)
        self._apply()
        self._left_out = None
        self._copy_to_model()
        for master in self.masters:
            master.grad = None

    def _average(self, trained: Sequence[tuple[Parameter, Parameter]]) -> None:
        """Average gradients over the ranks with the same weights."""
        gradients: dict[bool, list[Tensor]] = {False: [], True: []}
        for parameter, master in trained:
            gradients[id(parameter) in self._experts].append(_gradient(parameter, master))  # type: ignore[arg-type]
        self._reduce(gradients[False])
        if gradients[True]:
            self._reduce_experts(gradients[True])

    @torch.no_grad()
    def collect(self) -> None:
        """Move gradients that were not accumulated by autograd itself to where they are summed.

        A schedule that computes the gradients of weights apart adds them to the parameters.
        """
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if self._sums_in_masters and parameter.grad is not None:
                _move_gradient_to(master)(parameter)

    def leave_out(self, flag: Tensor) -> None:
        """Skip the update that is about to be made if a boolean scalar on the device is true."""
        self._left_out = flag if self._left_out is None else self._left_out | flag

    def to_model(self) -> None:
        """Copy the master weights, which were loaded, to the model's weights. Collective over all ranks."""
        with torch.no_grad():
            if hasattr(self.optimizer, "restore_weights"):
                self.optimizer.restore_weights()
            self._copy_to_model()

    @contextmanager
    def with_shared_weights(self) -> Iterator[None]:
        """Within, the model computes with the weights that a checkpoint contains, which all replicas have."""
        optimizer: Any = self.optimizer
        if not getattr(optimizer, "replicas_differ", False):
            yield
            return
        try:
            with optimizer.shared_weights():
                self._copy_to_model()
                yield
        finally:
            self._copy_to_model()

    def _make_masters(self, dtype: torch.dtype) -> list[Parameter]:
        """Cast the model's parameters; the previous data becomes the master weights, without a copy."""
        masters: list[Parameter] = []
        for group in self.param_groups:
            made = [master_weight(parameter) for parameter in group["params"]]
            for parameter in group["params"]:
                parameter.data = parameter.data.to(dtype)
            group["params"] = made
            masters += made
        return masters

    def _equalize_ties(self) -> None:
        """Send the gradients of tied weights from their first stage to the others.

        The last bit of a sum over three or more replicas depends on the place of a gradient in its message,
        and a tied weight has another place on every stage. Copies that differ once would stay different.
        Gradients of parts of weights are averaged before they are summed over the stages.
        """
        if self._groups.data.size <= 2 or self.is_sharded:
            return
        for parameter, master, group in self._ties:
            gradient = _gradient(parameter, master)
            if gradient is not None:
                broadcast(gradient, src=get_global_rank(group, 0), group=group)

    def _sum_parts(self) -> None:
        """Sum the gradients of which every tensor-parallel rank has a part.

        The stages' copies of a tied weight have other places in the message; summed over stages afterwards,
        their gradients are equal to the last bit.
        """
        gradients = [_gradient(*pair) for pair in self._partial]
        sum_partial_gradients([each for each in gradients if each is not None], self._groups.model)

    def _sum_over_stages(self) -> None:
        """Sum the gradients of tied weights over the pipeline stages with a copy."""
        for parameter, master, group in self._ties:
            gradient = _gradient(parameter, master)
            if gradient is None:
                # The other stages wait for this one, and sum in the same dtype.
                holder = master if self._sums_in_masters else parameter
                gradient = holder.grad = torch.zeros_like(holder)
            all_reduce(gradient, group=group)

    def _master_gradient(self, parameter: Parameter, master: Parameter) -> Tensor:
        if master.grad is None:
            assert parameter.grad is not None
            master.grad = parameter.grad.to(master.dtype)
            parameter.grad = None
        return master.grad

    def _scale(self, gradients: list[Tensor], scaled_norm: Tensor) -> None:
        """Unscale and clip gradients in one pass; store the norm and `found_inf`."""
        self.found_inf = (~scaled_norm.isfinite()).to(torch.float32)
        self.norm = scaled_norm if self.loss_scale is None else scaled_norm / self.loss_scale.value
        factor = None if self.loss_scale is None else 1.0 / self.loss_scale.value
        if self._max_norm > 0:
            clip = (self._max_norm / (self.norm + 1e-6)).clamp(max=1.0)
            factor = clip if factor is None else clip * factor
        if factor is not None:
            foreach_mul_(gradients, factor)

    def _apply(self) -> None:
        """Update the master weights unless this update is skipped, then the schedule and the loss scale."""
        assert self.found_inf is not None
        overflow = self.found_inf
        if self._left_out is not None:
            self.found_inf = overflow.maximum(self._left_out.to(overflow))
        if self.schedule.is_on_device:
            skip_on_device(self.optimizer, self.found_inf)
            self.optimizer.step()
            self.schedule.advance(self.found_inf)
        elif not bool(self.found_inf):
            self.optimizer.step()
            self.schedule.step()
        if self.loss_scale is not None:
            self.loss_scale.update(overflow)

    def _copy_to_model(self) -> None:
        if self.masters is not self.parameters:
            foreach_copy_(
                [parameter.data for parameter in self.parameters], [master.data for master in self.masters]
            )


def _gradient(parameter: Parameter, master: Parameter) -> Tensor | None:
    """Return the accumulated gradient, of the parameter or its master weight; None if there is none."""
    return parameter.grad if master.grad is None else master.grad


def _move_gradient_to(master: Parameter) -> Callable[[Tensor], None]:
    """Return a hook that adds a parameter's gradient to its master weight's, in the master weight's dtype."""

    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.detach()
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return move


class _GuardLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: Tensor | None) -> Tensor:
        ctx.loss, ctx.scale = loss.detach(), scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # 0 * loss is 0, or NaN where the loss is not finite.
        factor = 1.0 + 0.0 * ctx.loss if ctx.scale is None else ctx.scale + 0.0 * ctx.loss
        return gradients[0] * factor, None


def guard_loss(loss: Tensor, scale: Tensor | None) -> Tensor:
    """Return the loss with gradients that are scaled, and NaN if the loss is not finite.

    A loss may overflow while its gradients are finite. The NaNs make every rank's norm NaN, so that every
    rank skips the update.

    Args:
        loss: a scalar.
        scale: factor of the gradients, a scalar on the device; None: 1.
    """
    return _GuardLoss.apply(loss, scale)

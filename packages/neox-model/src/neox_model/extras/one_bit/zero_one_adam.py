"""0/1 Adam: Adam whose variance is updated at growing intervals, then steps that replicas take alone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from neox_config.extras.one_bit.intervals import Intervals
from neox_model.extras.one_bit.adam import OneBitAdam
from neox_model.extras.one_bit.frozen_phase import REPLICA_STATES
from neox_model.optim.moments import update_moments
from neox_model.parallel.groups import SINGLE_RANK, Group

__all__ = ["ZeroOneAdam"]

Pair = tuple[Tensor, dict[str, Any]]


class ZeroOneAdam(OneBitAdam):
    """Adam in updates that change the variance, momenta averaged with one bit in the others.

    The first `var_update_scaler` updates are those of Adam. Then only some are: the variance is changed, and
    gradients are averaged in full precision, at intervals that double. In the updates between these, each
    replica takes its own gradient into the momentum, and replicas average the momenta as in `OneBitAdam`.
    After `var_freeze_step` the variance is frozen, and the interval between averages grows. In local steps,
    between two averages, replicas move by their own momenta and their weights differ. A local step changes

        local_update = local_update * (1 - lr * weight_decay) + lr * exp_avg
        local_rate = local_rate * (1 - lr * weight_decay) + lr

    with the learning rate divided by the bias correction of the momentum, and the weight becomes the last
    synchronized weight, decayed alike, minus `local_update` / denominator. A synchronization averages
    `local_update` / `local_rate`, the mean momentum of the interval, with one bit per element. This becomes
    the momentum, and replaces the replica's own in the weight.

    The paper averages `local_update` itself. With a constant learning rate this is the same. With another one
    the compression errors of a large rate would be divided by a small one. DeepSpeed averages gradients
    instead of momenta before `var_freeze_step`, and its `bias_correction` has no effect; here it is Adam's.
    A replica without others does the same, but compresses nothing.

    While weights differ, `shared_weight` returns those that all replicas have: checkpoints store these, with
    the replica states of each, and `restore_weights` computes the replica's own from both. Evaluations
    compute with them, as with the checkpoint's model (`shared_weights`).

    Args:
        parameters: parameter groups, each with `weight_decay`, which is decoupled.
        var_freeze_step: see `Intervals`, as the next three.
        var_update_scaler: see `Intervals`.
        local_step_scaler: see `Intervals`.
        local_step_clipper: see `Intervals`.
        data_group: the data-parallel ranks.
        model_group: the ranks that share each layer's matrices.
        settings: `lr`, `betas`, `eps` and `bias_correction`, as of `OneBitAdam`.

    Source: arXiv:2202.06009, algorithm 1.
    """

    replica_states: Mapping[str, str] = {**REPLICA_STATES, "local_exp_avg": "mean", "local_update": "mean"}

    def __init__(
        self,
        parameters: list[dict[str, Any]],
        *,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        data_group: Group = SINGLE_RANK,
        model_group: Group = SINGLE_RANK,
        **settings: Any,
    ) -> None:
        super().__init__(
            parameters,
            freeze_step=var_freeze_step,
            data_group=data_group,
            model_group=model_group,
            **settings,
        )
        self._intervals = Intervals(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)
        # The weights of the last synchronization, decayed since; empty after a synchronization.
        self._shared: dict[Tensor, Tensor] = {}

    @property
    def averages_itself(self) -> bool:
        """Return True if the next update requires gradients that are not averaged over replicas."""
        return self.replicas_differ or not self._intervals.updates_variance(self._frozen.updates + 1)

    @property
    def replicas_differ(self) -> bool:
        """Return True after a local step: each replica has its own weights."""
        return bool(self._shared)

    def shared_weight(self, weight: Tensor) -> Tensor:
        """Return the value of a weight that all replicas have."""
        return self._shared.get(weight, weight)

    @torch.no_grad()
    def restore_weights(self) -> None:
        """Compute a replica's own weights, after shared weights and states were loaded.

        Collective over the model group.
        """
        local = [pair for pair in self._pairs() if "local_update" in self.state.get(pair[0], {})]
        self._shared = {weight: weight.clone() for weight, _ in local}
        self._frozen.note_smallest_roots([weight for weight, _ in local])
        self._use_own_weights()

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Within, the weights are those that all replicas have; afterwards the replica's own, to the bit."""
        with torch.no_grad():
            for weight, shared in self._shared.items():
                weight.copy_(shared)
        try:
            yield
        finally:
            self._use_own_weights()

    @torch.no_grad()
    def _use_own_weights(self) -> None:
        """Set the weights to this replica's own, with the same bits as its last step."""
        for weight, group in self._pairs():
            if weight in self._shared:
                self._place(weight, group)

    def _pairs(self) -> list[Pair]:
        """Return all weights, each with its group."""
        return [(weight, group) for group in self.param_groups for weight in group["params"]]

    def _update_as_adam(self) -> None:
        """Apply an update that changes the variance; gradients are averaged over replicas."""
        if not any("frozen_step" in state for state in self.state.values()):
            super()._update_as_adam()
            return
        trained = self._trained()
        self._frozen.forget_smallest_roots()
        for weight, gradient, group in trained:
            state = self.state[weight]
            if state:
                state.setdefault("frozen_step", state["step"].clone()).add_(1)
            update_moments(state, gradient, group["betas"])
            state.setdefault("frozen_step", state["step"].clone())
        self._frozen.note_smallest_roots([weight for weight, *_ in trained])
        for weight, _, group in trained:
            self._move(weight, group)

    def _update_compressed(self) -> None:
        """Apply an update in which each replica takes its own gradient into the momentum."""
        # Weights whose first gradient comes later have no variance.
        pairs = [
            pair
            for pair in self._pairs()
            if pair[0] in self._shared or (pair[0].grad is not None and "exp_avg_sq" in self.state[pair[0]])
        ]
        self._frozen.note_smallest_roots([weight for weight, _ in pairs])
        synchronizes = self._intervals.synchronizes(self._frozen.updates + 1)
        for weight, group in pairs:
            state = self.state[weight]
            if "local_exp_avg" in state:
                state["exp_avg"] = state.pop("local_exp_avg")
            if weight.grad is not None:
                self._frozen.take_gradient(state, weight.grad, group["betas"][0])
                if weight in self._shared or not synchronizes:
                    self._accumulate(weight, group)
        if synchronizes:
            self._synchronize(pairs)
            return
        for weight, group in pairs:
            self._place(weight, group)
            # A state has another name while it differs between replicas.
            self.state[weight]["local_exp_avg"] = self.state[weight].pop("exp_avg")

    def _accumulate(self, weight: Tensor, group: dict[str, Any]) -> None:
        """Take the momentum of a step into the update since the last synchronization."""
        state, kept = self.state[weight], 1 - group["lr"] * group["weight_decay"]
        if weight not in self._shared:
            self._shared[weight] = weight.detach().clone()
            state["local_update"] = torch.zeros_like(weight)
            state["local_rate"] = torch.zeros_like(state["step"])
        rate = torch.full_like(state["step"], group["lr"])
        if self._bias_correction:
            rate /= 1 - group["betas"][0] ** state["step"].double()
        self._shared[weight].mul_(kept)
        state["local_update"].mul_(kept).add_(state["exp_avg"] * rate)
        state["local_rate"].mul_(kept).add_(rate)

    def _place(self, weight: Tensor, group: dict[str, Any]) -> None:
        """Set a replica's weight to the shared one plus its own update, which a checkpoint stores."""
        weight.copy_(self._shared[weight])
        weight.addcdiv_(self.state[weight]["local_update"], self._root(weight, group), value=-1.0)

    def _synchronize(self, pairs: list[Pair]) -> None:
        """Average the momenta since the last synchronization, and move the shared weights by them."""
        local = {weight: self.state[weight] for weight, _ in pairs if weight in self._shared}
        _take_means(list(local.values()))
        self._frozen.average_momenta([self.state[weight] for weight, _ in pairs])
        for weight, group in pairs:
            if weight not in local:
                self._move(weight, group)
                continue
            state = local[weight]
            torch.mul(state["exp_avg"], state.pop("local_rate"), out=state["local_update"])
            self._place(weight, group)
            del state["local_update"]
        self._shared.clear()


def _take_means(states: list[dict[str, Any]]) -> None:
    """Set momenta to the means of those since the last synchronization."""
    if not states:
        return
    # Without a learning rate there was no update; the last momentum is the limit of small rates. Chosen on
    # the device, so that nothing is read back; the rates of all weights are sent there together.
    rates = torch.stack([state["local_rate"] for state in states])
    have_moved = (rates > 0).to(states[0]["exp_avg"].device, non_blocking=True)
    for state, has_moved in zip(states, have_moved.unbind(), strict=True):
        mean = state["local_update"] / state["local_rate"]
        state["exp_avg"] = torch.where(has_moved, mean, state["exp_avg"])

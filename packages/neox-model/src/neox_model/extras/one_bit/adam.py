"""1-bit Adam: Adam first, then a frozen variance and a momentum that replicas average with one bit."""

from typing import Any

import torch
from torch import Tensor

from neox_model.extras.one_bit.frozen_phase import REPLICA_STATES, AveragesMomenta, FrozenPhase
from neox_model.optim.adam import adam
from neox_model.optim.base import WeightOptimizer
from neox_model.parallel.groups import SINGLE_RANK, Group

__all__ = ["OneBitAdam"]

_COMPRESSED_STATES = ("frozen_step", *REPLICA_STATES)


class OneBitAdam(AveragesMomenta, WeightOptimizer):
    """Adam for `freeze_step` updates, then updates whose gradients are not averaged over replicas.

    In these each replica takes its own gradient into the momentum, replicas average the momenta with one bit
    per element (`CompressedAverage`), and the mean squared gradient no longer changes. Its bias correction
    stays that of the freeze, and the momentum's continues, so that no step jumps. Elements that had no
    gradient until then are not trained on, and only decay (`FrozenPhase.take_gradient`); those whose mean
    square is tiny are divided by a larger one (`FrozenPhase.root`). A replica without others compresses
    nothing.

    Args:
        parameters: parameter groups, each with `weight_decay`, which is decoupled.
        lr: learning rate.
        betas: decay of the running means of gradients and squared gradients.
        eps: added to the denominator.
        bias_correction: correct the running means for their initialization with zero.
        freeze_step: number of updates before the freeze.
        data_group: the data-parallel ranks.
        model_group: the ranks that share each layer's matrices.

    Source: arXiv:2102.02888, algorithm 1; bias correction and decoupled weight decay as in `adam`.
    """

    def __init__(
        self,
        parameters: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        bias_correction: bool = True,
        freeze_step: int = 100_000,
        data_group: Group = SINGLE_RANK,
        model_group: Group = SINGLE_RANK,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._frozen = FrozenPhase(self, freeze_step=freeze_step, group=data_group, model_group=model_group)
        self._bias_correction = bias_correction
        self._adam = adam(self.param_groups, lr=lr, betas=betas, eps=eps, bias_correction=bias_correction)

    def _apply(self) -> None:
        if self.averages_itself:
            self._update_compressed()
        else:
            self._update_as_adam()
        self._frozen.count_update()

    def _update_as_adam(self) -> None:
        trained = self._trained()
        self._frozen.forget_smallest_roots()
        for parameter, *_ in trained:
            # A run that was frozen continues with a later freeze.
            for name in _COMPRESSED_STATES:
                self.state[parameter].pop(name, None)
        # Both phases use the same states and settings; `load_state_dict` replaces both.
        self._adam.param_groups, self._adam.state = self.param_groups, self.state
        self._adam.step()
        for parameter, *_ in trained if not self._bias_correction else ():
            self.state[parameter].setdefault("step", torch.tensor(0.0)).add_(1)

    def _update_compressed(self) -> None:
        # Weights whose first gradient comes after the freeze have no variance.
        trained = [each for each in self._trained() if "exp_avg_sq" in self.state[each[0]]]
        self._frozen.note_smallest_roots([parameter for parameter, *_ in trained])
        for parameter, gradient, group in trained:
            self._frozen.take_gradient(self.state[parameter], gradient, group["betas"][0])
        self._frozen.average_momenta([self.state[parameter] for parameter, *_ in trained])
        for parameter, _, group in trained:
            self._move(parameter, group)

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Move a weight by its averaged momentum."""
        state, root = self.state[parameter], self._root(parameter, group)
        if self._bias_correction:
            root *= 1 - group["betas"][0] ** state["step"].double()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"])

    def _root(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the denominator of a weight's momentum."""
        state = self.state[parameter]
        root = self._frozen.root(parameter, state["exp_avg_sq"])
        if self._bias_correction:
            # On the device of the counts: nothing is read back.
            root /= (1 - group["betas"][1] ** state["frozen_step"].double()).sqrt()
        return root.add_(group["eps"])

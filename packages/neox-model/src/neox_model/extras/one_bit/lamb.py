"""1-bit LAMB: LAMB first, then frozen trust ratios with a factor, and momenta averaged with one bit."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from neox_model.extras.one_bit.frozen_phase import REPLICA_STATES, AveragesMomenta, FrozenPhase
from neox_model.optim.base import Trained
from neox_model.optim.lamb import Lamb
from neox_model.optim.split_weights import joined_maxima_
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import split_dim_of

__all__ = ["OneBitLamb"]

_COMPRESSED_STATES = ("frozen_step", "exp_avg_sq_fresh", "last_factor", *REPLICA_STATES)


class OneBitLamb(AveragesMomenta, Lamb):
    """LAMB for `freeze_step` updates, then updates whose gradients are not averaged over replicas.

    In these each replica takes its own gradient into the momentum, replicas average the momenta with one bit
    per element, and the mean squared gradient is frozen, as in `OneBitAdam`. The trust ratio of a weight is
    then its running average until the freeze times a factor: the largest ratio, over the elements, of the
    frozen denominator to one whose mean square continues, with the gradient that the averaged momenta imply.
    The paper scales momenta to one magnitude before it compresses them; here every tensor has its own scale,
    so that this would change nothing. The running average begins with the first ratio.

    Args:
        parameters: parameter groups, each with `weight_decay`.
        freeze_step: number of updates before the freeze.
        coeff_beta: decay of the running average of trust ratios.
        factor_max: largest factor.
        factor_min: smallest factor.
        factor_threshold: largest change of the factor in an update, relative to its last value.
        data_group: the data-parallel ranks.
        model_group: the ranks that share each layer's matrices.
        settings: the other arguments of `Lamb`.

    Source: arXiv:2104.06069, algorithm 1; the phase before the freeze is `Lamb`.
    """

    def __init__(
        self,
        parameters: list[dict[str, Any]],
        *,
        freeze_step: int = 100_000,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        data_group: Group = SINGLE_RANK,
        model_group: Group = SINGLE_RANK,
        **settings: Any,
    ) -> None:
        super().__init__(parameters, model_group=model_group, **settings)
        self._frozen = FrozenPhase(self, freeze_step=freeze_step, group=data_group, model_group=model_group)
        self._coeff_beta = coeff_beta
        self._factor_range = (factor_min, factor_max)
        self._factor_threshold = factor_threshold

    def _apply(self) -> None:
        if self.averages_itself:
            self._update_compressed()
        else:
            super()._apply()
        self._frozen.count_update()

    def _note_ratios(self, trained: Trained, ratios: Sequence[Tensor]) -> None:
        """Take the trust ratios of an update before the freeze into their running averages."""
        self._frozen.forget_smallest_roots()
        for (parameter, *_), ratio in zip(trained, ratios, strict=True):
            state = self.state[parameter]
            # A run that was frozen continues with a later freeze.
            for name in _COMPRESSED_STATES:
                state.pop(name, None)
            average = state.get("trust_average", ratio)
            state["trust_average"] = self._coeff_beta * average + (1 - self._coeff_beta) * ratio

    def _update_compressed(self) -> None:
        # Weights whose first gradient comes after the freeze have no variance.
        trained = [each for each in self._trained() if "exp_avg_sq" in self.state[each[0]]]
        self._frozen.note_smallest_roots([parameter for parameter, *_ in trained])
        for parameter, gradient, group in trained:
            state = self.state[parameter]
            before = state["exp_avg"].clone()
            self._frozen.take_gradient(state, gradient, group["betas"][0])
            # The gradient is used; its memory holds the last momentum until the averaged one is known.
            gradient.copy_(before)
        self._frozen.average_momenta([self.state[parameter] for parameter, *_ in trained])
        for parameter, before, group in trained:
            self._follow_variance(self.state[parameter], before, group["betas"])
        for (parameter, _, group), factor in zip(trained, self._factors(trained), strict=True):
            rate = self.state[parameter]["trust_average"] * factor
            parameter.addcmul_(self._frozen_direction(parameter, group), rate, value=-group["lr"])

    def _follow_variance(self, state: dict[str, Any], before: Tensor, betas: tuple[float, float]) -> None:
        """Take the gradient that the averaged momentum implies into the mean square that continues.

        Args:
            state: the weight's states.
            before: the momentum before this update.
            betas: decay of the running means.
        """
        if "exp_avg_sq_fresh" not in state:
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
        gradient = (state["exp_avg"] - betas[0] * before).div_(1 - betas[0])
        state["exp_avg_sq_fresh"].mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])

    def _factors(self, trained: Trained) -> list[Tensor]:
        """Return the factor of each weight's trust ratio, and store it."""
        found = [self._largest_ratio(parameter, group) for parameter, _, group in trained]
        split = [
            factor
            for (parameter, *_), factor in zip(trained, found, strict=True)
            if split_dim_of(parameter) is not None
        ]
        joined_maxima_(split, self._model_group)
        factors = []
        for (parameter, *_), factor in zip(trained, found, strict=True):
            last = self.state[parameter].get("last_factor", torch.ones_like(factor)).to(factor.device)
            change = self._factor_threshold * last
            factor = factor.clamp(*self._factor_range).clamp(last - change, last + change)
            self.state[parameter]["last_factor"] = factor
            factors.append(factor)
        return factors

    def _largest_ratio(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the largest ratio of the frozen denominator to the one that continues."""
        state = self.state[parameter]
        frozen = self._root(parameter, state["exp_avg_sq"], state["frozen_step"], group)
        fresh = self._root(parameter, state["exp_avg_sq_fresh"], state["step"], group)
        return torch.where(state["exp_avg_sq"] > 0, frozen / fresh, 0.0).amax()

    def _root(self, parameter: Tensor, square: Tensor, step: Tensor, group: dict[str, Any]) -> Tensor:
        root = self._frozen.root(parameter, square)
        if self._bias_correction:
            # Counts may be on a device: nothing is read back.
            root /= (1 - group["betas"][1] ** step.double()).sqrt()
        return root.add_(group["eps"])

    def _frozen_direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        direction = state["exp_avg"] / self._root(parameter, state["exp_avg_sq"], state["frozen_step"], group)
        if self._bias_correction:
            direction /= 1 - group["betas"][0] ** state["step"].double()
        return direction.add_(parameter, alpha=group["weight_decay"])

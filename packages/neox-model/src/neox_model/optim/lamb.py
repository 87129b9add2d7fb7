"""LAMB: Adam with a step for each weight in proportion to the norm of the weight."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from neox_kernels.precision import widen
from neox_model.optim.base import Trained, WeightOptimizer
from neox_model.optim.moments import moment_ratio, update_moments
from neox_model.optim.split_weights import whole_norms
from neox_model.parallel.groups import SINGLE_RANK, Group

__all__ = ["Lamb"]


class Lamb(WeightOptimizer):
    """Moves the weight w by lr * c * u against u, which is Adam's direction plus weight_decay * w.

    The trust ratio c is the norm of w divided by that of u, at least `min_coeff` and at most `max_coeff`; 1
    if one of the norms is zero. Each tensor of the model is one w, also if several ranks have parts of it.

    Args:
        parameters: parameter groups, each with `weight_decay`.
        lr: learning rate.
        betas: decay of the running means of gradients and squared gradients.
        eps: added to the denominator of Adam's direction.
        bias_correction: correct the running means for their initialization with zero.
        max_coeff: largest trust ratio.
        min_coeff: smallest trust ratio.
        model_group: the ranks that share each layer's matrices.
        row_group: the ranks that divide the rows of all weights (ZeRO).

    Source: arXiv:1904.00962, algorithm 2.
    """

    def __init__(
        self,
        parameters: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        model_group: Group = SINGLE_RANK,
        row_group: Group = SINGLE_RANK,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._bias_correction = bias_correction
        self._limits = (min_coeff, max_coeff)
        self._model_group = model_group
        self._row_group = row_group

    def _apply(self) -> None:
        trained = self._trained()
        for parameter, gradient, group in trained:
            update_moments(self.state[parameter], gradient, group["betas"])
        ratios = self._trust_ratios(trained)
        for (parameter, _, group), ratio in zip(trained, ratios, strict=True):
            parameter.addcmul_(self._direction(parameter, group), ratio, value=-group["lr"])
        self._note_ratios(trained, ratios)

    def _note_ratios(self, trained: Trained, ratios: Sequence[Tensor]) -> None:
        """Receive the trust ratios of an update; for classes that continue with them."""

    def _trust_ratios(self, trained: Trained) -> list[Tensor]:
        """Return each weight's trust ratio, with one collective per group of ranks for all."""
        if not trained:
            return []
        # Directions are computed again afterwards, so that they are never all in memory.
        rows = [
            torch.stack([_norm(parameter), _norm(self._direction(parameter, group))])
            for parameter, _, group in trained
        ]
        weights = [parameter for parameter, *_ in trained]
        norms = whole_norms(weights, torch.stack(rows), self._model_group, self._row_group)
        ratios = (norms[:, 0] / norms[:, 1]).clamp(*self._limits)
        return list(torch.where((norms > 0).all(dim=1), ratios, 1.0).unbind())

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        ratio = moment_ratio(
            self.state[parameter], group["betas"], eps=group["eps"], bias_correction=self._bias_correction
        )
        return ratio.add_(parameter, alpha=group["weight_decay"])


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(widen(tensor))

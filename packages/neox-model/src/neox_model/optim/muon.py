"""Muon: orthogonal steps for the matrices of linear layers, and Adam for everything else."""

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from neox_model.optim.moments import moment_ratio, update_moments
from neox_model.optim.split_weights import whole_weight
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import split_dim_of

__all__ = ["Muon", "orthogonalized"]

# Of x, x^3 and x^5 in a step of the iteration, which moves singular values towards 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7


class Muon(Optimizer):
    """Moves a matrix against its momentum, with all singular values of the momentum replaced by about 1.

    The momentum is the mean of gradients with the decay `momentum`; with `nesterov`, the last gradient is
    taken into it twice. The step of a matrix with R rows and C columns is lr * sqrt(max(1, R / C)) times the
    orthogonal matrix. All other weights (embeddings, head, norms, biases) are updated by Adam. Weight decay
    is decoupled in both.

    torch.optim.Muon makes the same updates, to the last bit, but accepts only matrices, whole on each rank.
    Here the momentum of a matrix that tensor-parallel ranks split is gathered before it is made orthogonal.

    Args:
        parameters: parameter groups, each with `weight_decay`, and `is_of_matrices`: True for Muon.
        lr: learning rate of the matrices, the largest of the schedule.
        momentum: decay of the momentum.
        nesterov: Nesterov momentum.
        ns_steps: steps of the Newton-Schulz iteration.
        adam_lr: learning rate of the other weights where that of the matrices is the groups' `reference_lr`,
            in proportion elsewhere; None: that of the matrices. A schedule sets both.
        betas: of Adam: decay of the running means of gradients and squared gradients.
        eps: of Adam: added to the denominator.
        iteration_dtype: dtype of the Newton-Schulz iteration. bfloat16, as in torch.optim.Muon, is fast, but
            rounding of gradients, which differs by layout, grows to a few percent of a step.
        model_group: the ranks that share each layer's matrices.

    Source: arXiv:2502.16982, section 2.1; kellerjordan.github.io/posts/muon (coefficients, step size).
    """

    def __init__(
        self,
        parameters: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adam_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        iteration_dtype: torch.dtype = torch.bfloat16,
        model_group: Group = SINGLE_RANK,
    ) -> None:
        defaults = {"lr": lr, "reference_lr": lr, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(parameters, {**defaults, "weight_decay": 0.0, "is_of_matrices": False})
        self._nesterov = nesterov
        self._steps = ns_steps
        self._dtype = iteration_dtype
        self._adam_lr = adam_lr
        self._model_group = model_group

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply one update. Collective over the tensor-parallel ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            update = self._update_matrix if group["is_of_matrices"] else self._update_other
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update(parameter, parameter.grad, group)
        return loss

    def _update_matrix(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, momentum, rate = self.state[parameter], group["momentum"], group["lr"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(mean, momentum) if self._nesterov else mean
        dim = split_dim_of(parameter)
        if dim is not None:
            direction = whole_weight(direction.to(self._dtype), dim, self._model_group)
        rows, columns = direction.shape
        step = orthogonalized(direction, self._steps, dtype=self._dtype)
        if dim is not None:
            length = parameter.shape[dim]
            step = step.narrow(dim, self._model_group.rank * length, length)
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.add_(step, alpha=-rate * sqrt(max(1, rows / columns)))

    def _update_other(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, rate = self.state[parameter], self._rate_of_others(group)
        update_moments(state, gradient, group["betas"])
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.sub_(moment_ratio(state, group["betas"], eps=group["eps"]), alpha=rate)

    def _rate_of_others(self, group: dict[str, Any]) -> float:
        rate: float = group["lr"]
        if self._adam_lr is None or not group["reference_lr"]:  # No rate is relative to 0.
            return rate
        return rate * (self._adam_lr / group["reference_lr"])


def orthogonalized(matrix: Tensor, steps: int, *, dtype: torch.dtype) -> Tensor:
    """Return the matrix with singular values between about 0.7 and 1.2, if `steps` is 5.

    Args:
        matrix: whole, two-dimensional.
        steps: steps of the Newton-Schulz iteration x -> a x + b (x x^T) x + c (x x^T)^2 x.
        dtype: dtype of the iteration and the result.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.T if is_tall else matrix).to(dtype)
    wide = wide / wide.norm().clamp(min=_SMALLEST_NORM)
    a, b, c = _COEFFICIENTS
    for _ in range(steps):
        square = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(square, square, square, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide

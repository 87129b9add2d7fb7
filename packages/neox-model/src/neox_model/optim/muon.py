"""Muon: orthogonal steps for the matrices of linear layers, and Adam for everything else."""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from neox_model.optim.base import WeightOptimizer
from neox_model.optim.moments import moment_ratio, update_moments
from neox_model.optim.row_exchange import RowExchange
from neox_model.optim.split_weights import whole_weight
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import split_dim_of, whole_shape_of

__all__ = ["Muon", "orthogonalized"]

# Of x, x^3 and x^5 in a step of the iteration, which moves singular values towards 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7


class Muon(WeightOptimizer):
    """Moves a matrix against its momentum, with all singular values of the momentum replaced by about 1.

    The momentum is the mean of gradients with the decay `momentum`; with `nesterov`, the last gradient is
    taken into it twice. The step of a matrix with R rows and C columns is lr * sqrt(max(1, R / C)) times the
    orthogonal matrix. All other weights (embeddings, head, norms, biases) are updated by Adam. Weight decay
    is decoupled in both.

    torch.optim.Muon makes the same updates, to the last bit, but accepts only matrices, whole on each rank.
    Here the momentum of a matrix that tensor-parallel ranks split is gathered before it is made orthogonal.
    Where data-parallel ranks divide the rows of all weights, each of them makes the momenta of its share of
    the matrices orthogonal, and sends the rows of the results back.

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
        row_group: the ranks that divide the rows of all weights (ZeRO).

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
        row_group: Group = SINGLE_RANK,
    ) -> None:
        defaults = {"lr": lr, "reference_lr": lr, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(parameters, {**defaults, "weight_decay": 0.0, "is_of_matrices": False})
        self._nesterov = nesterov
        self._steps = ns_steps
        self._dtype = iteration_dtype
        self._adam_lr = adam_lr
        self._model_group = model_group
        self._row_group = row_group

    def _apply(self) -> None:
        matrices = []
        for parameter, gradient, group in self._trained():
            if group["is_of_matrices"]:
                matrices.append((parameter, group))
            else:
                self._update_other(parameter, gradient, group)
        # Ranks that compute at the same time have matrices of about the same size.
        matrices.sort(key=lambda pair: whole_shape_of(pair[0]).numel(), reverse=True)
        for start in range(0, len(matrices), self._row_group.size):
            self._update_matrices(matrices[start : start + self._row_group.size])

    def _update_matrices(self, matrices: Sequence[tuple[Tensor, dict[str, Any]]]) -> None:
        """Update matrices, of which each rank of the row group makes one momentum orthogonal."""
        directions = [self._direction(parameter, group) for parameter, group in matrices]
        exchange = RowExchange([self._local_shape(parameter) for parameter, _ in matrices], self._row_group)
        direction = exchange.gather(directions)
        step = None if direction is None else self._step_of(matrices[self._row_group.rank][0], direction)
        for (parameter, group), part in zip(matrices, exchange.scatter(step, directions[0]), strict=True):
            rate, (rows, columns) = group["lr"], whole_shape_of(parameter)
            parameter.mul_(1 - rate * group["weight_decay"])
            parameter.add_(part, alpha=-rate * sqrt(max(1, rows / columns)))

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Take the gradient into the momentum, and return this rank's rows of what is made orthogonal."""
        state, gradient, momentum = self.state[parameter], parameter.grad, group["momentum"]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(mean, momentum) if self._nesterov else mean
        return direction.to(self._dtype)

    def _local_shape(self, parameter: Tensor) -> tuple[int, int]:
        """Return the shape of what this tensor-parallel rank has of a matrix, with the rows of all ranks."""
        shape, dim = list(whole_shape_of(parameter)), split_dim_of(parameter)
        if dim is not None:
            shape[dim] //= self._model_group.size
        rows, columns = shape
        return rows, columns

    def _step_of(self, parameter: Tensor, direction: Tensor) -> Tensor:
        """Return the part of the orthogonal matrix that belongs to this tensor-parallel rank's direction."""
        dim = split_dim_of(parameter)
        if dim is None:
            return orthogonalized(direction, self._steps, dtype=self._dtype)
        whole = whole_weight(direction, dim, self._model_group)
        length = direction.shape[dim]
        step = orthogonalized(whole, self._steps, dtype=self._dtype)
        return step.narrow(dim, self._model_group.rank * length, length)

    def _update_other(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, rate = self.state[parameter], group["lr"]
        if self._adam_lr is not None and group["reference_lr"]:  # No rate is relative to 0.
            rate = rate * (self._adam_lr / group["reference_lr"])
        update_moments(state, gradient, group["betas"])
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.sub_(moment_ratio(state, group["betas"], eps=group["eps"]), alpha=rate)


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

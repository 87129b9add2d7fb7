"""Muon: orthogonal steps for the matrices of linear layers, and Adam for everything else."""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from neox_config.facts.optimizers import MUON_SCALES
from neox_model.optim.base import WeightOptimizer
from neox_model.optim.moments import moment_ratio, update_moments
from neox_model.optim.row_exchange import RowExchange
from neox_model.optim.split_weights import whole_weight
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import RowBlocks, blocks_of, rows_of, split_dim_of, whole_shape_of

__all__ = ["COEFFICIENTS", "Muon", "orthogonalized"]

_Coefficients = tuple[float, float, float]

# The fastest odd polynomials of degree five for singular values from 0.003 to 1, one after the other: each is
# the best approximation of 1 between the smallest and the largest value that the one before leaves, and 1 %
# more for rounding. The last one is what they converge to.
_POLAR_EXPRESS: Sequence[_Coefficients] = (
    (8.301928846360545, -24.042428062285943, 17.469941796496002),
    (4.007800670440793, -2.926616078383468, 0.5425066647973282),
    (3.489622391042909, -2.5654111963256034, 0.5028035439334234),
    (2.497349900597289, -1.8125770680826085, 0.4217034879301643),
    (1.9137259874585062, -1.2814301667417538, 0.36922163445001954),
    (1.875, -1.25, 0.375),
)

COEFFICIENTS: Mapping[str, Sequence[_Coefficients]] = {
    "polar_express": _POLAR_EXPRESS,
    "quintic": ((3.4445, -4.7750, 2.0315),),
}
"""Name -> of x, x^3 and x^5 in each step of the iteration; further steps are like the last one."""

_SMALLEST_NORM = 1e-7

# The dimensions of a stack of matrices: [matrices, inputs, outputs], where a matrix is [outputs, inputs].
_STACK = 3

# (repetitions, count, height, columns) -> the matrices that are made orthogonal; None: the whole weight is.
_MATRICES: Mapping[str, Callable[[Tensor], Tensor] | None] = {
    "together": None,
    "separate": lambda blocks: blocks.flatten(0, 2),
    "per_head": lambda blocks: blocks.flatten(0, 1),
}


class Muon(WeightOptimizer):
    """Moves a matrix against its momentum, with all singular values of the momentum replaced by about 1.

    The momentum is the mean of gradients with the decay `momentum`; with `nesterov`, the last gradient is
    taken into it twice. The step of a matrix is lr * `scale` times the orthogonal matrix. All other weights
    (embeddings, head, norms, biases) are updated by Adam. Weight decay is decoupled in both.

    With `qkv: together`, `coefficients: quintic` and no further options, torch.optim.Muon makes the same
    updates, to the last bit, but accepts only matrices, whole on each rank. Here the momentum of a matrix
    that tensor-parallel ranks split is gathered before it is made orthogonal. Where data-parallel ranks
    divide the rows of all weights, each of them makes the momenta of its share of the matrices orthogonal,
    and sends the rows of the results back. A weight of three dimensions is a stack of matrices, such as those
    of experts, whose rows are their inputs: each is made orthogonal, on the rank that has it.

    Args:
        parameters: parameter groups, each with `weight_decay`, and `is_of_matrices`: True for Muon.
        lr: learning rate of the matrices, the largest of the schedule.
        momentum: decay of the momentum.
        nesterov: Nesterov momentum.
        ns_steps: steps of the iteration that makes a matrix orthogonal.
        coefficients: those of the iteration, a key of `COEFFICIENTS`.
        qkv: what is made orthogonal of a weight that is several matrices in one (`RowBlocks`), the projection
            to query, key and value: the whole (together), each of the three (separate), or each head of
            each (per_head).
        scale: factor of the orthogonal matrix, of R rows and C columns: sqrt(max(1, R / C)) (original), or
            0.2 * sqrt(max(R, C)) (match_rms_adamw), with which the step has about the root mean square of
            AdamW's, so that its learning rate serves.
        row_beta: decay of the mean square of each row of the orthogonal matrix, by whose root the row is
            divided (NorMuon). The matrix keeps the norm of an orthogonal one. 0: rows are not divided.
        cautious_decay: decay only elements that the step moves towards 0 as well.
        adam_lr: learning rate of the other weights where that of the matrices is the groups' `reference_lr`,
            in proportion elsewhere; None: that of the matrices. A schedule sets both.
        betas: of Adam: decay of the running means of gradients and squared gradients.
        eps: of Adam, and of the division of rows: added to the denominator.
        iteration_dtype: dtype of the iteration. bfloat16, as in torch.optim.Muon, is fast, but rounding of
            gradients, which differs by layout, grows to a few percent of a step.
        model_group: the ranks that share each layer's matrices.
        row_group: the ranks that divide the rows of all weights (ZeRO).

    Attributes:
        slice_states: state -> the dimensions of the weight along which it has one value per slice.

    Source: arXiv:2502.16982, section 2.1 and 2.2 (match_rms_adamw); kellerjordan.github.io/posts/muon
    (quintic, original); arXiv:2505.16932 (polar_express: its method, with the bound 0.003);
    arXiv:2510.05491, algorithm 1 (row_beta); arXiv:2510.12402 (cautious_decay).
    """

    slice_states: Mapping[str, tuple[int, ...]] = {"row_variance": (0, 2)}

    def __init__(
        self,
        parameters: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        coefficients: str = "polar_express",
        qkv: str = "separate",
        scale: str = "original",
        row_beta: float = 0.0,
        cautious_decay: bool = False,
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
        self._coefficients = COEFFICIENTS[coefficients]
        self._divide = _MATRICES[qkv]
        self._scale = MUON_SCALES[scale]
        self._row_beta = row_beta
        self._is_cautious = cautious_decay
        self._dtype = iteration_dtype
        self._adam_lr = adam_lr
        self._model_group = model_group
        self._row_group = row_group

    def _apply(self) -> None:
        matrices = []
        for parameter, gradient, group in self._trained():
            if not group["is_of_matrices"]:
                self._update_other(parameter, gradient, group)
            elif parameter.dim() == _STACK:
                self._update_matrices([(parameter, group)], SINGLE_RANK)
            else:
                matrices.append((parameter, group))
        # Ranks that compute at the same time have matrices of about the same size.
        matrices.sort(key=lambda pair: whole_shape_of(pair[0]).numel(), reverse=True)
        for start in range(0, len(matrices), self._row_group.size):
            self._update_matrices(matrices[start : start + self._row_group.size], self._row_group)

    def _update_matrices(self, matrices: Sequence[tuple[Tensor, dict[str, Any]]], ranks: Group) -> None:
        """Update matrices, of which each of the ranks makes one momentum orthogonal, or a stack of them."""
        directions = [self._direction(parameter, group) for parameter, group in matrices]
        exchange = RowExchange([self._local_shape(parameter) for parameter, _ in matrices], ranks)
        direction = exchange.gather(directions)
        step = None if direction is None else self._step_of(matrices[ranks.rank][0], direction)
        for (parameter, group), part in zip(matrices, exchange.scatter(step, directions[0]), strict=True):
            scaled, factor = self._scaled(parameter, part, group["eps"])
            self._decay(parameter, scaled, group["lr"] * group["weight_decay"])
            parameter.add_(scaled, alpha=-group["lr"] * factor)

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Take the gradient into the momentum, and return this rank's rows of what is made orthogonal."""
        state, gradient, momentum = self.state[parameter], parameter.grad, group["momentum"]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(mean, momentum) if self._nesterov else mean
        return direction.to(self._dtype)

    def _local_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Return the shape of what this tensor-parallel rank has of a matrix, with the rows of all ranks."""
        shape, dim = list(whole_shape_of(parameter)), split_dim_of(parameter)
        if dim is not None:
            shape[dim] //= self._model_group.size
        return tuple(shape)

    def _step_of(self, parameter: Tensor, direction: Tensor) -> Tensor:
        """Return the part of the orthogonal matrix that belongs to this tensor-parallel rank's direction."""
        dim = split_dim_of(parameter)
        if dim is None:
            return self._orthogonal(parameter, direction)
        step = self._orthogonal(parameter, whole_weight(direction, dim, self._model_group))
        length = direction.shape[dim]
        return step.narrow(dim, self._model_group.rank * length, length)

    def _orthogonal(self, parameter: Tensor, direction: Tensor) -> Tensor:
        """Return a whole direction made orthogonal, or each of the matrices in it."""

        def orthogonal(matrix: Tensor) -> Tensor:
            return orthogonalized(matrix, self._steps, coefficients=self._coefficients, dtype=self._dtype)

        return self._of_each(orthogonal, direction, self._blocks(parameter))

    def _blocks(self, parameter: Tensor) -> RowBlocks | None:
        return None if self._divide is None else blocks_of(parameter)

    def _of_each(
        self, function: Callable[[Tensor], Tensor], whole: Tensor, blocks: RowBlocks | None
    ) -> Tensor:
        """Apply a function to each matrix of a whole one, or to such rows of another width."""
        if self._divide is None or blocks is None:
            return function(whole)
        return blocks.join([function(self._divide(matrix)) for matrix in blocks.split(whole)])

    def _scaled(self, parameter: Tensor, part: Tensor, eps: float) -> tuple[Tensor, float]:
        """Return this rank's rows of a step, and a factor that they still have to be multiplied by."""
        blocks, shape = self._blocks(parameter), whole_shape_of(parameter)
        # Those of the map from inputs to outputs: of a stack, what is stored is transposed.
        rows, columns = shape[2 if parameter.dim() == _STACK else 0], shape[1]
        if blocks is None and not self._row_beta:
            return part, self._scale(rows, columns)
        if parameter.dim() == _STACK:
            part, own = self._with_divided_rows(parameter, part.to(parameter.dtype), eps)
            total = own.sum(2, keepdim=True)
            if split_dim_of(parameter) == 2:
                total = all_reduce(total, self._model_group)
            return part * self._factor(total, rows, columns), 1.0
        first, last = rows_of(parameter)
        squares = parameter.new_ones(rows, 1)
        if self._row_beta:
            part, own = self._with_divided_rows(parameter, part.to(parameter.dtype), eps)
            squares.zero_()[first:last] = own
            squares = all_reduce(squares, self._row_group)
            if split_dim_of(parameter) == 0:
                squares = all_reduce(squares, self._model_group)

        def factors(of_rows: Tensor) -> Tensor:
            height = of_rows.shape[-2]
            if not self._row_beta:
                return torch.full_like(of_rows, self._scale(height, columns))
            return self._factor(of_rows.sum(-2, keepdim=True), height, columns).expand_as(of_rows)

        return part * self._of_each(factors, squares, blocks)[first:last], 1.0

    def _factor(self, squares: Tensor, rows: int, columns: int) -> Tensor:
        """Return the factors of matrices with these sums of squares: of the norm of orthogonal ones."""
        norm = squares.sqrt().clamp(min=_SMALLEST_NORM)
        return torch.full_like(norm, self._scale(rows, columns)).mul_(sqrt(min(rows, columns))).div_(norm)

    def _with_divided_rows(self, parameter: Tensor, part: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Divide rows by the roots of their mean squares; return them, and their sums of squares.

        The columns of a row may be on several tensor-parallel ranks.
        """
        state, columns = self.state[parameter], whole_shape_of(parameter)[1]
        squares = part.square().sum(1, keepdim=True)
        if split_dim_of(parameter) == 1:
            squares = all_reduce(squares, self._model_group)
        if "row_variance" not in state:
            state["row_variance"] = torch.zeros_like(squares)
        variance = state["row_variance"].lerp_(squares / columns, 1 - self._row_beta)
        roots = variance.sqrt().add_(eps)
        return part / roots, squares / roots.square()

    def _decay(self, parameter: Tensor, step: Tensor, amount: float) -> None:
        if self._is_cautious:
            parameter.sub_(parameter * (step.sign() * parameter >= 0), alpha=amount)
        else:
            parameter.mul_(1 - amount)

    def _update_other(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, rate = self.state[parameter], group["lr"]
        if self._adam_lr is not None and group["reference_lr"]:  # No rate is relative to 0.
            rate = rate * (self._adam_lr / group["reference_lr"])
        update_moments(state, gradient, group["betas"])
        step = moment_ratio(state, group["betas"], eps=group["eps"])
        self._decay(parameter, step, rate * group["weight_decay"])
        parameter.sub_(step, alpha=rate)


def orthogonalized(
    matrix: Tensor, steps: int, *, coefficients: Sequence[_Coefficients] = _POLAR_EXPRESS, dtype: torch.dtype
) -> Tensor:
    """Return a matrix, or each of several of the same shape, with singular values of about 1.

    With five steps, values of at least 0.003 times the Frobenius norm become 0.994 to 1.006 with the
    coefficients `polar_express`, and about 0.7 to 1.2 with `quintic`.

    Args:
        matrix: whole, in the last two dimensions of at most three.
        steps: steps of the iteration x -> a x + b (x x^T) x + c (x x^T)^2 x.
        coefficients: a, b and c of each step; further steps are like the last one.
        dtype: dtype of the iteration and the result.
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    wide = (matrix.mT if is_tall else matrix).to(dtype)
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=_SMALLEST_NORM)
    add_product = torch.addmm if wide.dim() == 2 else torch.baddbmm
    for step in range(steps):
        a, b, c = coefficients[min(step, len(coefficients) - 1)]
        square = wide @ wide.mT
        wide = add_product(wide, add_product(square, square, square, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide

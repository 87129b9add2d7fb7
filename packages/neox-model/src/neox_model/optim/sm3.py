"""SM3: adaptive steps from one number per row and one per column of a matrix."""

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from neox_model.optim.base import WeightOptimizer
from neox_model.optim.split_weights import joined_maxima_
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import split_dim_of

__all__ = ["SM3"]


class SM3(WeightOptimizer):
    """Moves an element with the gradient g by lr * g / sqrt(v + eps), v from the covers of the element.

    A cover is a row or a column, or one element of a vector, and stores the largest v of its elements. v is
    g^2 plus the smallest value of the covers of the element; with `beta`, beta times that value plus
    (1 - beta) * g^2, and covers never decrease. Covers that several ranks have elements of are joined. It
    applies no weight decay.

    Args:
        parameters: parameter groups.
        lr: learning rate.
        momentum: weight of the mean of previous steps; 0 stores no value per element.
        beta: decay of v; 0 is the sum of squares of the paper.
        eps: added to v, so that elements without a gradient do not move.
        model_group: the ranks that share each layer's matrices.
        row_group: the ranks that divide the rows of all weights (ZeRO).

    Attributes:
        slice_states: state -> the dimensions of the weight along which it has one value per slice.

    Source: arXiv:1901.11150, algorithm SM3-II with momentum; `beta` and `eps` as in GPT-NeoX.
    """

    slice_states: Mapping[str, tuple[int, ...]] = {"accumulator_0": (0,), "accumulator_1": (1,)}

    def __init__(
        self,
        parameters: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.0,
        beta: float = 0.0,
        eps: float = 1e-30,
        model_group: Group = SINGLE_RANK,
        row_group: Group = SINGLE_RANK,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "beta": beta, "eps": eps})
        self._model_group = model_group
        self._row_group = row_group

    def _apply(self) -> None:
        over_rows: list[Tensor] = []
        over_parts: list[Tensor] = []
        for parameter, gradient, group in self._trained():
            covers, split = self._update(parameter, gradient, group), split_dim_of(parameter)
            over_rows += covers[1:]
            if split is not None:
                over_parts += [cover for dim, cover in enumerate(covers) if dim != split]
        joined_maxima_(over_rows, self._row_group)
        joined_maxima_(over_parts, self._model_group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> list[Tensor]:
        """Update a weight; return its covers by dimension, with the maxima of what this rank has."""
        state, beta = self.state[parameter], group["beta"]
        covers = self._covers(parameter)
        smallest = reduce(torch.minimum, covers)
        squares = (beta * smallest).expand_as(gradient) if beta else smallest.expand_as(gradient)
        squares = squares.addcmul(gradient, gradient, value=1 - beta)
        for dim, cover in enumerate(covers):
            largest = _largest_along(squares, dim)
            cover.copy_(torch.maximum(cover, largest) if beta else largest)
        step = squares.add_(group["eps"]).rsqrt_().mul_(gradient)
        if group["momentum"]:
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            step = state["momentum_buffer"].lerp_(step, 1 - group["momentum"])
        parameter.sub_(step, alpha=group["lr"])
        return covers

    def _covers(self, parameter: Tensor) -> list[Tensor]:
        """Return what a weight's covers store: for each dimension, a tensor of this length along it."""
        state, found = self.state[parameter], []
        for dim, length in enumerate(parameter.shape):
            name = f"accumulator_{dim}"
            if name not in state:
                shape = [length if each == dim else 1 for each in range(parameter.dim())]
                state[name] = parameter.new_zeros(shape)
            found.append(state[name])
        return found


def _largest_along(squares: Tensor, dim: int) -> Tensor:
    """Return the maximum of each slice along a dimension; 0 where a rank without rows has no elements."""
    others = [other for other in range(squares.dim()) if other != dim]
    if not others:
        return squares
    if squares.numel() == 0:
        return squares.new_zeros([length if each == dim else 1 for each, length in enumerate(squares.shape)])
    return squares.amax(others, keepdim=True)

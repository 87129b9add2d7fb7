"""Low-rank adapters of split matrices: alpha / rank * B (A x), added to the output of a matrix.

The matrix whose side is split has the adapter's matrix of that side split: B of a column-parallel matrix, by
outputs, and A of a row-parallel one, by inputs. The other is a copy on every rank. What is communicated has
the width of the rank. B starts as zeros, so that an adapter first adds nothing.

Source: arXiv:2106.09685; the initialization of A is that of PEFT.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_config.facts.adapters import adapter_scale
from neox_model.parallel.groups import Group
from neox_model.parallel.logical import logical_parameter
from neox_model.parallel.partial_gradients import ensure_partial
from neox_model.parallel.random import in_split_stream
from neox_model.parallel.sequence import from_row_parallel, to_column_parallel

__all__ = ["Adapter", "LowRank", "LowRankPair", "adapter_parameters", "freeze_all_but_adapters"]


@dataclass(frozen=True, slots=True)
class LowRank:
    """The form of an adapter.

    Args:
        rank: width between A and B.
        alpha: the output is multiplied by alpha / rank.
        dropout: dropout probability of the input.
        is_summed_later: the output of a row-parallel matrix is this rank's part of a sum, and so is the
            adapter's.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    is_summed_later: bool = False

    @property
    def scale(self) -> float:
        """Return the factor of the output."""
        return adapter_scale(rank=self.rank, alpha=self.alpha)


class LowRankPair(nn.Module):
    """The matrices A and B of an adapter.

    Args:
        form: rank, scale and dropout.
        group: the ranks over which the adapted matrix is split.
        splits_inputs: True for a row-parallel matrix, False for a column-parallel one.
        whole: for A and B, the shape.
        dims: for A and B, the dimension that is split if the side is.
        experts: the ranks that divide the first dimension, which is that of experts; None: it is another one.
    """

    def __init__(
        self,
        form: LowRank,
        group: Group,
        *,
        splits_inputs: bool,
        whole: tuple[tuple[int, ...], tuple[int, ...]],
        dims: tuple[int, int],
        experts: Group | None = None,
    ) -> None:
        super().__init__()
        self.form = form
        self.group = group
        self.splits_inputs = splits_inputs
        (of_a, of_b), (a_dim, b_dim) = whole, dims
        options: dict[str, Any] = {"group": group, "kind": "other", "experts": experts}
        self.a = logical_parameter(of_a, init=_uniform, split_dim=a_dim if splits_inputs else None, **options)
        self.b = logical_parameter(of_b, init=_zeros, split_dim=None if splits_inputs else b_dim, **options)

    def _dropped(self, inputs: Tensor, *, differ: bool) -> Tensor:
        """Drop elements of the input, on each rank others if the ranks have other elements."""
        if not self.training or self.form.dropout == 0.0:
            return inputs
        drop = partial(functional.dropout, inputs, self.form.dropout)
        return in_split_stream(self.group, inputs.device, drop) if differ else drop()


class Adapter(LowRankPair):
    """The adapter of a split matrix.

    Args:
        in_features: width of the whole input; a rank has its part if the inputs are split.
        out_features: width of the whole output.
        form: rank, scale and dropout.
        group: the ranks over which the matrix is split.
        splits_inputs: True for a row-parallel matrix, False for a column-parallel one.
    """

    def __init__(
        self, in_features: int, out_features: int, form: LowRank, group: Group, *, splits_inputs: bool
    ) -> None:
        whole = (form.rank, in_features), (out_features, form.rank)
        super().__init__(form, group, splits_inputs=splits_inputs, whole=whole, dims=(1, 0))
        self._is_part = splits_inputs and form.is_summed_later
        if self._is_part:
            ensure_partial(self.b, group)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the adapter's output, given the input of the matrix, and split or summed like its output."""
        differ = self.splits_inputs or self.group.splits_sequence
        inner = functional.linear(self._dropped(inputs, differ=differ), self.a)
        if not self._is_part:
            enter = from_row_parallel if self.splits_inputs else to_column_parallel
            inner = enter(inner, self.group)
        return functional.linear(inner, self.b) * self.form.scale


def _uniform(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill A uniformly within 1 / sqrt(inputs) of 0; its dimension 1 is the inputs."""
    bound = 1 / math.sqrt(tensor.shape[1])
    tensor.uniform_(-bound, bound, generator=generator)


def _zeros(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.zero_()


def adapter_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of all adapters of a model."""
    for module in model.modules():
        if isinstance(module, LowRankPair):
            yield from module.parameters()


def freeze_all_but_adapters(model: nn.Module) -> None:
    """Let no gradients be computed for the weights of a model that has adapters; else change nothing."""
    trained = {id(parameter) for parameter in adapter_parameters(model)}
    if trained:
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)

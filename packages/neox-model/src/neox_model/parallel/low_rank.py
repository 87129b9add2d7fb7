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
from neox_model.parallel.random import in_split_stream
from neox_model.parallel.sequence import from_row_parallel, to_column_parallel

__all__ = ["Adapter", "LowRank", "adapter_parameters", "freeze_all_but_adapters"]


@dataclass(frozen=True, slots=True)
class LowRank:
    """The form of an adapter.

    Args:
        rank: width between A and B.
        alpha: the output is multiplied by alpha / rank.
        dropout: dropout probability of the input.
    """

    rank: int
    alpha: float
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """Return the factor of the output."""
        return adapter_scale(rank=self.rank, alpha=self.alpha)


class Adapter(nn.Module):
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
        super().__init__()
        self.form = form
        self.group = group
        self.splits_inputs = splits_inputs
        of_a, of_b = (1, None) if splits_inputs else (None, 0)
        options: dict[str, Any] = {"group": group, "kind": "other"}
        self.a = logical_parameter((form.rank, in_features), init=_uniform, split_dim=of_a, **options)
        self.b = logical_parameter((out_features, form.rank), init=_zeros, split_dim=of_b, **options)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the adapter's output, given the input of the matrix, and split or summed like its output."""
        inner = functional.linear(self._dropped(inputs), self.a)
        enter = from_row_parallel if self.splits_inputs else to_column_parallel
        return functional.linear(enter(inner, self.group), self.b) * self.form.scale

    def _dropped(self, inputs: Tensor) -> Tensor:
        """Drop elements of the input, on each rank others if the ranks have other elements."""
        if not self.training or self.form.dropout == 0.0:
            return inputs
        drop = partial(functional.dropout, inputs, self.form.dropout)
        if self.splits_inputs or self.group.splits_sequence:
            return in_split_stream(self.group, inputs.device, drop)
        return drop()


def _uniform(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill A uniformly within 1 / sqrt(inputs) of 0."""
    bound = 1 / math.sqrt(tensor.shape[1])
    tensor.uniform_(-bound, bound, generator=generator)


def _zeros(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.zero_()


def adapter_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of all adapters of a model."""
    for module in model.modules():
        if isinstance(module, Adapter):
            yield from module.parameters()


def freeze_all_but_adapters(model: nn.Module) -> None:
    """Let no gradients be computed for the weights of a model that has adapters; else change nothing."""
    trained = {id(parameter) for parameter in adapter_parameters(model)}
    if trained:
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)

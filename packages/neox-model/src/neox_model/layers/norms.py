"""Normalisations over the hidden width, by name.

Weights are whole on every tensor-parallel rank. Statistics are computed in float32 whatever the input's
dtype.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_model.parallel.groups import SINGLE, Group
from neox_model.parallel.linear import zero_init
from neox_model.parallel.logical import logical_parameter

__all__ = ["NORMS", "LayerNorm", "RMSNorm", "ScaleNorm"]


def _one_init(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.fill_(1.0)


def _layer_norm(inputs: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    return functional.layer_norm(inputs, weight.shape, weight, bias, epsilon)


class LayerNorm(nn.Module):
    """Zero mean and unit variance over the width, then a scale and a shift per channel.

    Args:
        width: channels.
        epsilon: added to the variance.
        operator: function of (inputs, weight, bias, epsilon) that computes it.
        group: tensor-parallel ranks, which may each norm their part of the sequence.
    """

    def __init__(
        self,
        width: int,
        epsilon: float = 1e-5,
        operator: Callable[[Tensor, Tensor, Tensor, float], Tensor] = _layer_norm,
        group: Group = SINGLE,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.operator = operator
        self.weight = logical_parameter((width,), init=_one_init, group=group)
        self.bias = logical_parameter((width,), init=zero_init, group=group)

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalised `inputs`, over the last dimension."""
        return self.operator(inputs, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + epsilon), no shift.

    Args:
        width: channels.
        epsilon: added to the mean square.
        group: tensor-parallel ranks, which may each norm their part of the sequence.

    Source: arXiv:1910.07467.
    """

    def __init__(self, width: int, epsilon: float = 1e-8, group: Group = SINGLE) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = logical_parameter((width,), init=_one_init, group=group)

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalised `inputs`, over the last dimension, in their dtype."""
        wide = inputs.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.epsilon)
        return (wide * scale * self.weight).to(inputs.dtype)


class ScaleNorm(nn.Module):
    """weight * x / max(length of x, epsilon), with one number as weight.

    Args:
        width: channels (the weight does not depend on it).
        epsilon: smallest length divided by.
        group: tensor-parallel ranks, which may each norm their part of the sequence.

    Source: arXiv:1910.05895, section 3.2.
    """

    def __init__(self, width: int, epsilon: float = 1e-8, group: Group = SINGLE) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = logical_parameter((1,), init=_one_init, group=group)

    def forward(self, inputs: Tensor) -> Tensor:
        """`inputs` at unit length over the last dimension, times the weight, in their dtype."""
        wide = inputs.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp(min=self.epsilon)
        return (self.weight * wide / length).to(inputs.dtype)


# apexlayernorm is a second name for layernorm's mathematics, computed by NVIDIA apex's kernel where it is.
NORMS: dict[str, type[nn.Module]] = {
    "layernorm": LayerNorm,
    "apexlayernorm": LayerNorm,
    "rmsnorm": RMSNorm,
    "scalenorm": ScaleNorm,
}

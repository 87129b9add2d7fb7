"""Normalizations over the hidden width, by name.

Weights are whole on every tensor-parallel rank. Statistics of 16-bit inputs are computed in float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.linear import zero_init
from neox_model.parallel.logical import logical_parameter

__all__ = ["NORMS", "LayerNorm", "RMSNorm", "ScaleNorm"]


def _one_init(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.fill_(1.0)


def _layer_norm(inputs: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    return functional.layer_norm(inputs, weight.shape, weight, bias, epsilon)


class LayerNorm(nn.Module):
    """Normalizes to zero mean and unit variance over the width, then scales and shifts each channel.

    Args:
        width: number of channels.
        epsilon: added to the variance.
        operator: implementation, a function of (inputs, weight, bias, epsilon).
        group: tensor-parallel ranks; with sequence parallelism each normalizes its part of the sequence.
        bias: add a bias.
        of_sum: implementation of (inputs, residual, weight, bias, epsilon) that returns the sum of inputs and
            residual, and the normalized sum; None: the norm is not called with a residual.
    """

    def __init__(
        self,
        width: int,
        epsilon: float = 1e-5,
        operator: Callable[[Tensor, Tensor, Tensor | None, float], Tensor] = _layer_norm,
        group: Group = SINGLE_RANK,
        *,
        bias: bool = True,
        of_sum: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.operator = operator
        self.of_sum = of_sum
        self.weight = logical_parameter((width,), init=_one_init, group=group)
        self.bias = logical_parameter((width,), init=zero_init, group=group) if bias else None

    def forward(self, inputs: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize over the last dimension; with a residual, return their sum, and the sum normalized."""
        if residual is None:
            return self.operator(inputs, self.weight, self.bias, self.epsilon)
        assert self.of_sum is not None
        return self.of_sum(inputs, residual, self.weight, self.bias, self.epsilon)


def _rms_norm(inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return functional.rms_norm(inputs, weight.shape, weight, epsilon)


class RMSNorm(nn.Module):
    """Computes weight * x / sqrt(mean(x^2) + epsilon).

    Args:
        width: number of channels.
        epsilon: added to the mean square.
        operator: implementation, a function of (inputs, weight, epsilon).
        group: tensor-parallel ranks; with sequence parallelism each normalizes its part of the sequence.
        of_sum: implementation of (inputs, residual, weight, epsilon) that returns the sum of inputs and
            residual, and the normalized sum; None: the norm is not called with a residual.

    Source: arXiv:1910.07467.
    """

    def __init__(
        self,
        width: int,
        epsilon: float = 1e-8,
        operator: Callable[[Tensor, Tensor, float], Tensor] = _rms_norm,
        group: Group = SINGLE_RANK,
        *,
        of_sum: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.operator = operator
        self.of_sum = of_sum
        self.weight = logical_parameter((width,), init=_one_init, group=group)

    def forward(self, inputs: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize over the last dimension; with a residual, return their sum, and the sum normalized.

        The results have the dtype of `inputs`.
        """
        if residual is None:
            return self.operator(inputs, self.weight, self.epsilon)
        assert self.of_sum is not None
        return self.of_sum(inputs, residual, self.weight, self.epsilon)


class ScaleNorm(nn.Module):
    """Computes weight * x / max(norm of x, epsilon), with a scalar weight.

    Args:
        width: number of channels (the weight does not depend on it).
        epsilon: lower bound of the divisor.
        group: tensor-parallel ranks; with sequence parallelism each normalizes its part of the sequence.

    Source: arXiv:1910.05895, section 3.2.
    """

    def __init__(self, width: int, epsilon: float = 1e-8, group: Group = SINGLE_RANK) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = logical_parameter((1,), init=_one_init, group=group)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scale to the weight's length over the last dimension; the result has the dtype of `inputs`."""
        wide = inputs.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp(min=self.epsilon)
        return (self.weight * wide / length).to(inputs.dtype)


# apexlayernorm is the same function as layernorm, computed by NVIDIA apex's kernel if it is installed.
NORMS: dict[str, type[nn.Module]] = {
    "layernorm": LayerNorm,
    "apexlayernorm": LayerNorm,
    "rmsnorm": RMSNorm,
    "scalenorm": ScaleNorm,
}

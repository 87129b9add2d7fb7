"""Normalizations over the hidden width, by name.

Weights are whole on every tensor-parallel rank. Statistics of 16-bit inputs are computed in float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_kernels.precision import widen
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.linear import one_init, zero_init
from neox_model.parallel.logical import logical_parameter
from neox_model.parallel.token_sums import layer_norm

__all__ = ["NORMS", "LayerNorm", "RMSNorm", "ScaleNorm"]


class Norm(nn.Module, ABC):
    """Normalizes over the last dimension, alone or together with what a residual connection adds.

    Args:
        operator: implementation, a function of (inputs, the parameters and numbers of `_arguments`).
        fused_add_norm: implementation of (inputs, residual, the same) that returns the sum of inputs and
            residual, and the normalized sum; None: the norm is not called with a residual.
        with_input: `operator` in a form that returns the inputs too, and adds the gradient that arrives there
            in its backward pass; None: autograd adds it.
    """

    def __init__(
        self,
        operator: Callable[..., Tensor],
        fused_add_norm: Callable[..., tuple[Tensor, Tensor]] | None = None,
        with_input: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.operator = operator
        self.fused_add_norm = fused_add_norm
        self.with_input = with_input

    @abstractmethod
    def _arguments(self) -> tuple[Any, ...]:
        """Return what the implementation gets after the inputs."""

    def forward(
        self, inputs: Tensor, residual: Tensor | None = None, *, returns_input: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the normalized inputs, with the dtype of `inputs`.

        Args:
            inputs: any shape `[..., width]`.
            residual: return the sum of inputs and residual, and that normalized.
            returns_input: return the inputs, for a residual connection, and those normalized.
        """
        if residual is not None:
            assert self.fused_add_norm is not None
            return self.fused_add_norm(inputs, residual, *self._arguments())
        if returns_input and self.with_input is not None and not torch.compiler.is_compiling():
            return self.with_input(inputs, *self._arguments())
        normed = self.operator(inputs, *self._arguments())
        return (inputs, normed) if returns_input else normed


class LayerNorm(Norm):
    """Normalizes to zero mean and unit variance over the width, then scales and shifts each channel.

    Args:
        width: number of channels.
        epsilon: added to the variance.
        operator: implementation, a function of (inputs, weight, bias, epsilon).
        group: tensor-parallel ranks; with sequence parallelism each normalizes its part of the sequence.
        bias: add a bias.
        forms: other forms of `operator`, as for Norm.
    """

    def __init__(
        self,
        width: int,
        epsilon: float = 1e-5,
        operator: Callable[..., Tensor] = layer_norm,
        group: Group = SINGLE_RANK,
        *,
        bias: bool = True,
        **forms: Callable[..., tuple[Tensor, Tensor]] | None,
    ) -> None:
        super().__init__(operator, **forms)
        self.epsilon = epsilon
        self.weight = logical_parameter((width,), init=one_init, group=group)
        self.bias = logical_parameter((width,), init=zero_init, group=group) if bias else None

    def _arguments(self) -> tuple[Tensor, Tensor | None, float]:
        return self.weight, self.bias, self.epsilon


def _rms_norm(inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return functional.rms_norm(inputs, weight.shape, weight, epsilon)


class RMSNorm(Norm):
    """Computes weight * x / sqrt(mean(x^2) + epsilon).

    Args:
        width: number of channels.
        epsilon: added to the mean square.
        operator: implementation, a function of (inputs, weight, epsilon).
        group: tensor-parallel ranks; with sequence parallelism each normalizes its part of the sequence.
        forms: other forms of `operator`, as for Norm.

    Source: arXiv:1910.07467.
    """

    def __init__(
        self,
        width: int,
        epsilon: float = 1e-8,
        operator: Callable[..., Tensor] = _rms_norm,
        group: Group = SINGLE_RANK,
        **forms: Callable[..., tuple[Tensor, Tensor]] | None,
    ) -> None:
        super().__init__(operator, **forms)
        self.epsilon = epsilon
        self.weight = logical_parameter((width,), init=one_init, group=group)

    def _arguments(self) -> tuple[Tensor, float]:
        return self.weight, self.epsilon


def _scale_norm(inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = widen(inputs)
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp(min=epsilon)
    return (weight * wide / length).to(inputs.dtype)


class ScaleNorm(Norm):
    """Computes weight * x / max(norm of x, epsilon), with a scalar weight.

    Args:
        width: number of channels (the weight does not depend on it).
        epsilon: lower bound of the divisor.
        group: tensor-parallel ranks; with sequence parallelism each normalizes its part of the sequence.

    Source: arXiv:1910.05895, section 3.2.
    """

    def __init__(self, width: int, epsilon: float = 1e-8, group: Group = SINGLE_RANK) -> None:
        super().__init__(_scale_norm)
        self.epsilon = epsilon
        self.weight = logical_parameter((1,), init=one_init, group=group)

    def _arguments(self) -> tuple[Tensor, float]:
        return self.weight, self.epsilon


# apexlayernorm is the same function as layernorm, computed by NVIDIA apex's kernel if it is installed.
NORMS: dict[str, type[nn.Module]] = {
    "layernorm": LayerNorm,
    "apexlayernorm": LayerNorm,
    "rmsnorm": RMSNorm,
    "scalenorm": ScaleNorm,
}

"""Normalizations over the hidden width, by name.

Weights are whole on every tensor-parallel rank, except those over channels that ranks split. Statistics of
16-bit inputs are computed in float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_kernels.precision import widen
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.linear import one_init, zero_init
from neox_model.parallel.logical import logical_parameter
from neox_model.parallel.token_sums import layer_norm

__all__ = ["NORMS", "LayerNorm", "NonParametricLayerNorm", "Norm", "RMSNorm", "ScaleNorm"]


class Norm(nn.Module, ABC):
    """Normalizes over the last dimension, alone or together with what a residual connection adds.

    Args:
        operator: implementation, a function of (inputs, the parameters and numbers of `_arguments`); None:
            PyTorch's.
        fused_add_norm: implementation of (inputs, residual, the same) that returns the sum of inputs and
            residual, and the normalized sum; None: the norm is not called with a residual.
        with_input: `operator` in a form that returns the inputs too, and adds the gradient that arrives there
            in its backward pass; None: autograd adds it.
        zero_centered: the weight is stored minus 1, and begins at 0.

    Attributes:
        plain: PyTorch's implementation.
    """

    plain: Callable[..., Tensor]
    weight: nn.Parameter

    def __init__(
        self,
        operator: Callable[..., Tensor] | None = None,
        fused_add_norm: Callable[..., tuple[Tensor, Tensor]] | None = None,
        with_input: Callable[..., tuple[Tensor, Tensor]] | None = None,
        *,
        zero_centered: bool = False,
    ) -> None:
        super().__init__()
        if operator is None:
            operator = partial(_in_wide, self.plain) if zero_centered else self.plain
        self.operator = operator
        self.zero_centered = zero_centered
        self.fused_add_norm = fused_add_norm
        self.with_input = with_input

    @abstractmethod
    def _arguments(self) -> tuple[Any, ...]:
        """Return what the implementation gets after the inputs."""

    def _new_weight(self, width: int, group: Group, *, is_split: bool = False) -> nn.Parameter:
        init = zero_init if self.zero_centered else one_init
        return logical_parameter((width,), init=init, group=group, split_dim=0 if is_split else None)

    def _factor(self) -> Tensor:
        """Return what the normalized inputs are multiplied by."""
        # In 16 bits, 1 + weight would lose most of the weight's digits.
        return 1.0 + widen(self.weight) if self.zero_centered else self.weight

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


def _in_wide(operator: Callable[..., Tensor], inputs: Tensor, *arguments: Any) -> Tensor:
    """Apply an operator to 16-bit inputs in float32, with weights in float32."""
    wide = (widen(each) if isinstance(each, Tensor) else each for each in arguments)
    return operator(widen(inputs), *wide).to(inputs.dtype)


class LayerNorm(Norm):
    """Normalizes to zero mean and unit variance over the width, then scales and shifts each channel.

    Args:
        width: number of channels.
        epsilon: added to the variance.
        operator: implementation, a function of (inputs, weight, bias, epsilon).
        group: tensor-parallel ranks; with sequence parallelism each normalizes its part of the sequence.
        bias: add a bias.
        is_split: the ranks split the channels; `operator` normalizes over those of all ranks.
        options: other arguments of Norm.
    """

    plain = staticmethod(layer_norm)

    def __init__(
        self,
        width: int,
        epsilon: float = 1e-5,
        operator: Callable[..., Tensor] | None = None,
        group: Group = SINGLE_RANK,
        *,
        bias: bool = True,
        is_split: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(operator, **options)
        self.epsilon = epsilon
        self.weight = self._new_weight(width, group, is_split=is_split)
        split_dim = 0 if is_split else None
        self.bias = (
            logical_parameter((width,), init=zero_init, group=group, split_dim=split_dim) if bias else None
        )

    def _arguments(self) -> tuple[Tensor, Tensor | None, float]:
        return self._factor(), self.bias, self.epsilon


def _centered(inputs: Tensor, epsilon: float) -> Tensor:
    return functional.layer_norm(inputs, inputs.shape[-1:], eps=epsilon)


class NonParametricLayerNorm(Norm):
    """Normalizes to zero mean and unit variance over the width.

    Args:
        width: number of channels (nothing depends on it).
        epsilon: added to the variance.
        operator: implementation, a function of (inputs, epsilon).
        options: ignored; other norms have weights, which need them.

    Source: arXiv:2402.00838.
    """

    plain = staticmethod(_centered)

    def __init__(
        self,
        width: int,
        epsilon: float = 1e-5,
        operator: Callable[..., Tensor] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(operator)
        self.epsilon = epsilon

    def _arguments(self) -> tuple[float]:
        return (self.epsilon,)


def _rms_norm(inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if inputs.dtype != weight.dtype:
        # Under autocast, outputs of matrices are in 16 bits and weights are not.
        wide = functional.rms_norm(widen(inputs), weight.shape, widen(weight), epsilon)
        return wide.to(inputs.dtype)
    return functional.rms_norm(inputs, weight.shape, weight, epsilon)


class RMSNorm(Norm):
    """Computes weight * x / sqrt(mean(x^2) + epsilon).

    Args:
        width: number of channels.
        epsilon: added to the mean square.
        operator: implementation, a function of (inputs, weight, epsilon).
        group: tensor-parallel ranks; with sequence parallelism each normalizes its part of the sequence.
        is_split: the ranks split the channels, as for LayerNorm.
        options: other arguments of Norm.

    Source: arXiv:1910.07467.
    """

    plain = staticmethod(_rms_norm)

    def __init__(
        self,
        width: int,
        epsilon: float = 1e-8,
        operator: Callable[..., Tensor] | None = None,
        group: Group = SINGLE_RANK,
        *,
        is_split: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(operator, **options)
        self.epsilon = epsilon
        self.weight = self._new_weight(width, group, is_split=is_split)

    def _arguments(self) -> tuple[Tensor, float]:
        return self._factor(), self.epsilon


def _scale_norm(inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = widen(inputs)
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp(min=epsilon)
    return (weight * wide / length).to(inputs.dtype)


class ScaleNorm(Norm):
    """Computes weight * x / max(norm of x, epsilon), with a scalar weight.

    Args:
        width: number of channels (the weight does not depend on it).
        epsilon: lower bound of the divisor.
        operator: implementation, a function of (inputs, weight, epsilon).
        group: tensor-parallel ranks; with sequence parallelism each normalizes its part of the sequence.
        is_split: the ranks split the channels; the weight is whole.
        options: other arguments of Norm.

    Source: arXiv:1910.05895, section 3.2.
    """

    plain = staticmethod(_scale_norm)

    def __init__(
        self,
        width: int,
        epsilon: float = 1e-8,
        operator: Callable[..., Tensor] | None = None,
        group: Group = SINGLE_RANK,
        *,
        is_split: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(operator, **options)
        self.epsilon = epsilon
        self.weight = self._new_weight(1, group)

    def _arguments(self) -> tuple[Tensor, float]:
        return self._factor(), self.epsilon


# apexlayernorm is the same function as layernorm, computed by NVIDIA apex's kernel if it is installed.
NORMS: dict[str, type[Norm]] = {
    "layernorm": LayerNorm,
    "apexlayernorm": LayerNorm,
    "rmsnorm": RMSNorm,
    "scalenorm": ScaleNorm,
    "non_parametric_layernorm": NonParametricLayerNorm,
}

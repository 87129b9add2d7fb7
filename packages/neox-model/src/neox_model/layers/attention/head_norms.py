"""Norms of queries and keys: of each head, or over the heads of all tensor-parallel ranks together."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_kernels.precision import widen
from neox_model.layers.norms import LayerNorm, NonParametricLayerNorm, Norm, RMSNorm, ScaleNorm
from neox_model.parallel.collectives import copy_to_group, reduce_from_group
from neox_model.parallel.groups import Group
from neox_model.parallel.logical import split_dim_of
from neox_model.parallel.partial_gradients import mark_partial

__all__ = ["HeadNorms", "over_ranks", "rms_norm_of_heads"]


class HeadNorms(nn.ModuleDict):
    """Normalizes queries and keys, each with its own norm, or both with one.

    Each rank applies weights that it holds whole to its own heads: their gradients are summed over the ranks.

    Args:
        norms: factories of the norms `query` and `key`, or of one, `both`.
        joins_heads: the norms are over the channels of all heads; False: over those of each head.
        group: the ranks over which the heads are split.
    """

    def __init__(
        self, norms: Mapping[str, Callable[[], nn.Module]], *, joins_heads: bool, group: Group
    ) -> None:
        super().__init__({name: norm() for name, norm in norms.items()})
        self.joins_heads = joins_heads
        if group.size > 1:
            for parameter in self.parameters():
                if split_dim_of(parameter) is None:
                    mark_partial(parameter, group)

    def forward(self, query_SBNK: Tensor, key_SBNK: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalized queries and keys, with their shapes and dtypes."""
        norms = list(self.values())
        return self._normed(norms[0], query_SBNK), self._normed(norms[-1], key_SBNK)

    def _normed(self, norm: nn.Module, heads_SBNK: Tensor) -> Tensor:
        inputs = heads_SBNK.flatten(2) if self.joins_heads else heads_SBNK
        normed: Tensor = norm(inputs)
        # Under autocast, a norm returns float32.
        return normed.to(heads_SBNK.dtype).view(heads_SBNK.shape)


def rms_norm_of_heads(head_width: int, inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Apply an RMS norm to each head, given the channels of several; with a weight for each of these.

    Args:
        head_width: channels of a head.
        inputs: [..., channels of all heads].
        weight: [channels of all heads].
        epsilon: added to the mean square.
    """
    heads = widen(inputs).unflatten(-1, (-1, head_width))
    normal = functional.rms_norm(heads, (head_width,), eps=epsilon).flatten(-2)
    return (normal * weight).to(inputs.dtype)


def over_ranks(norm: type[Norm], group: Group) -> Callable[..., Tensor] | None:
    """Return the operator of a norm whose channels a group splits; None: the norm's own, for one rank."""
    return None if group.size == 1 else partial(_OVER_RANKS[norm], group)


def _mean(wide: Tensor, group: Group) -> Tensor:
    """Return the mean over the channels of all ranks, to whose parts the results of all ranks contribute."""
    total = copy_to_group(reduce_from_group(wide.sum(-1, keepdim=True), group), group)
    return total / (wide.shape[-1] * group.size)


def _rms_norm(group: Group, inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = widen(inputs)
    return (wide * torch.rsqrt(_mean(wide.square(), group) + epsilon) * weight).to(inputs.dtype)


def _centered(group: Group, inputs: Tensor, epsilon: float) -> Tensor:
    wide = widen(inputs)
    wide = wide - _mean(wide, group)
    return (wide * torch.rsqrt(_mean(wide.square(), group) + epsilon)).to(inputs.dtype)


def _layer_norm(group: Group, inputs: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    scaled = _centered(group, widen(inputs), epsilon) * weight
    return (scaled if bias is None else scaled + bias).to(inputs.dtype)


def _scale_norm(group: Group, inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = widen(inputs)
    square = _mean(wide.square(), group) * (wide.shape[-1] * group.size)
    return (weight * wide / square.clamp(min=epsilon**2).sqrt()).to(inputs.dtype)


_OVER_RANKS: Mapping[type[Norm], Callable[..., Tensor]] = {
    LayerNorm: _layer_norm,
    NonParametricLayerNorm: _centered,
    RMSNorm: _rms_norm,
    ScaleNorm: _scale_norm,
}

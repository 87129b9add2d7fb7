"""Attention with torch's operators, and the parts shared by all attention cores.

`DenseCore` is torch's scaled_dot_product_attention (flash attention if the device supports it; its softmax is
float32). Causal attention requires no mask. With a pattern, documents or a relative position it receives a
mask of queries by keys, and is the reference implementation of `FlexCore`. `SoftmaxCore` stores the scores
and calls a softmax operator; it is used if the configuration requests a fused softmax kernel, or the scaling
by layer that keeps float16 scores small.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_model.layers.attention.patterns import Pattern
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.random import in_split_stream

__all__ = ["Core", "DenseCore", "SoftmaxCore", "bias_of_scores", "hidden_keys"]


def hidden_keys(
    num_queries: int,
    num_keys: int,
    document_ids_BS: Tensor | None,
    device: torch.device,
    pattern: Pattern | None = None,
) -> Tensor:
    """Return masked_out [B or 1, N or 1, S, T]: later keys, keys of other documents or outside the pattern.

    With T > S the queries are the last S tokens.
    """
    query_S1 = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    key_T = torch.arange(num_keys, device=device)
    masked_out = (key_T > query_S1)[None, None]
    if pattern is not None:
        head_N11 = torch.arange(pattern.num_masks, device=device)[:, None, None]
        masked_out = masked_out | ~pattern(head_N11, query_S1, key_T)
    if document_ids_BS is not None:
        is_foreign = document_ids_BS[:, -num_queries:].unsqueeze(2) != document_ids_BS.unsqueeze(1)
        masked_out = masked_out | is_foreign.unsqueeze(1)
    return masked_out


def bias_of_scores(position: nn.Module, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return bias_NST of a relative position; values for later keys are undefined."""
    bias_NT = position(num_keys, device)
    query_S1 = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    distance_ST = (query_S1 - torch.arange(num_keys, device=device)).clamp(min=0)
    return bias_NT[:, distance_ST]


class Core(nn.Module):
    """Base class of attention cores.

    Args:
        pattern: factory of the pattern of visible keys; None: all earlier keys.
        position: factory of a relative position (see positions.relative); None: no relative position.
        dropout: dropout probability of attention weights.
        group: the ranks over which the heads are split; their dropout differs.
    """

    def __init__(
        self,
        *,
        pattern: Callable[[], Pattern] | None = None,
        position: Callable[[], nn.Module] | None = None,
        dropout: float = 0.0,
        group: Group = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.pattern = pattern() if pattern is not None else None
        self.position = position() if position is not None else None
        self.dropout = dropout
        self.group = group


class DenseCore(Core):
    """Computes softmax(query key^T / sqrt(head width) + bias) value with torch's attention."""

    def forward(
        self, query_SBNK: Tensor, key_TBNK: Tensor, value_TBNK: Tensor, document_ids_BS: Tensor | None = None
    ) -> Tensor:
        """Return context_SBNK; with T > S the queries are the last S tokens. Heads may share keys."""
        mask = self._mask(query_SBNK, len(key_TBNK), document_ids_BS)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBNK, key_TBNK, value_TBNK))
        dropout = self.dropout if self.training else 0.0
        options: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": mask is None and len(query_SBNK) == len(key_TBNK),
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        attend = partial(
            functional.scaled_dot_product_attention, query, key, value, dropout_p=dropout, **options
        )
        context = attend() if dropout == 0.0 else in_split_stream(self.group, query.device, attend)
        return context.permute(2, 0, 1, 3)

    def _mask(self, query_SBNK: Tensor, num_keys: int, document_ids_BS: Tensor | None) -> Tensor | None:
        """Return the mask, boolean or as a bias of scores; None if `is_causal` suffices."""
        num_queries, device = len(query_SBNK), query_SBNK.device
        is_causal_alone = self.pattern is None and self.position is None and document_ids_BS is None
        if is_causal_alone and num_queries in (1, num_keys):
            return None
        masked_out = hidden_keys(num_queries, num_keys, document_ids_BS, device, self.pattern)
        if self.position is None:
            return ~masked_out
        bias_NST = bias_of_scores(self.position, num_queries, num_keys, device)
        return bias_NST.to(query_SBNK.dtype).masked_fill(masked_out, float("-inf"))


class SoftmaxCore(Core):
    """Computes the same as DenseCore, with stored scores and a softmax operator.

    Args:
        softmax: function of (scores_BNST, scale, masked_out or None) that masks later keys and the masked-out
            ones, and computes in float32.
        head_width: channels of a head.
        coefficient: scores are divided by it when computed and multiplied by it inside the softmax (layer
            scaling). A bias is added in between, as in GPT-NeoX, so it counts `coefficient` times.
        options: arguments of Core.
    """

    def __init__(
        self,
        *,
        softmax: Callable[[Tensor, float, Tensor | None], Tensor],
        head_width: int,
        coefficient: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.softmax = softmax
        self.scale = head_width**-0.5 / coefficient
        self.coefficient = coefficient

    def forward(
        self, query_SBNK: Tensor, key_TBNK: Tensor, value_TBNK: Tensor, document_ids_BS: Tensor | None = None
    ) -> Tensor:
        """Return context_SBNK; with T > S the queries are the last S tokens. Heads may share keys."""
        num_queries, num_keys, device = len(query_SBNK), len(key_TBNK), query_SBNK.device
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBNK, key_TBNK, value_TBNK))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scores_BNST = (query * self.scale) @ key.transpose(-1, -2)
        if self.position is not None:
            bias_NST = bias_of_scores(self.position, num_queries, num_keys, device)
            scores_BNST = scores_BNST + bias_NST.to(scores_BNST.dtype)
        masked_out = None
        if document_ids_BS is not None or self.pattern is not None or num_queries != num_keys:
            masked_out = hidden_keys(num_queries, num_keys, document_ids_BS, device, self.pattern)
        weights_BNST = self.softmax(scores_BNST, self.coefficient, masked_out)
        if self.training and self.dropout > 0.0:
            drop = partial(functional.dropout, weights_BNST, self.dropout)
            weights_BNST = in_split_stream(self.group, device, drop)
        return (weights_BNST @ value).permute(2, 0, 1, 3)

"""Attention with torch's operators, and the parts shared by all attention cores.

`DenseCore` is torch's scaled_dot_product_attention (flash attention if the device supports it; its softmax is
float32). Attention to all earlier tokens, or to all tokens, requires no mask. With a pattern, documents or a
relative position it receives a mask of queries by keys, and is the reference implementation of `FlexCore`.
`SoftmaxCore` stores the scores and calls a softmax operator; it is used if the configuration requests a fused
softmax kernel, or the scaling by layer that keeps float16 scores small, or what torch's attention does not
compute: limited scores and sinks. For these it is the reference implementation of `FlexScoresCore`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_kernels import scaled_masked_softmax
from neox_kernels.precision import widen
from neox_model.layers.attention.patterns import Pattern
from neox_model.layers.cache import Span
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.linear import zero_init
from neox_model.parallel.logical import logical_parameter
from neox_model.parallel.random import in_split_stream

__all__ = ["Core", "DenseCore", "SoftmaxCore", "hidden_keys"]


def hidden_keys(
    num_queries: int,
    num_keys: int,
    document_ids_BS: Tensor | None,
    device: torch.device,
    pattern: Pattern | None = None,
    *,
    is_causal: bool = True,
) -> Tensor:
    """Return masked_out [B or 1, N or 1, S, T]: keys of other documents or outside the pattern, later keys.

    Later keys are masked out if `is_causal`. With T > S the queries are the last S tokens.
    """
    query_S1 = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    key_T = torch.arange(num_keys, device=device)
    is_later_ST = key_T > query_S1
    masked_out = (is_later_ST if is_causal else torch.zeros_like(is_later_ST))[None, None]
    if pattern is not None:
        head_N11 = torch.arange(pattern.num_masks, device=device)[:, None, None]
        masked_out = masked_out | ~pattern(head_N11, query_S1, key_T)
    if document_ids_BS is not None:
        is_foreign = document_ids_BS[:, -num_queries:].unsqueeze(2) != document_ids_BS.unsqueeze(1)
        masked_out = masked_out | is_foreign.unsqueeze(1)
    return masked_out


class Core(nn.Module):
    """Base class of attention cores.

    The scores of a query are its products with keys times `scale`, then limited by `softcap`, then those of
    hidden keys are left out and the bias of `position` is added.

    Args:
        scale: None: the width of a head to the power of -1/2.
        pattern: factory of the pattern of visible keys; None: all keys.
        position: factory of a relative position (see positions.relative); None: no relative position.
        is_causal: later keys are hidden.
        dropout: dropout probability of attention weights.
        group: the ranks over which the heads are split; their dropout differs.
    """

    softcap: float | None = None
    sinks: nn.Parameter | None

    def __init__(
        self,
        *,
        scale: float | None = None,
        pattern: Callable[[], Pattern] | None = None,
        position: Callable[[], nn.Module] | None = None,
        is_causal: bool = True,
        dropout: float = 0.0,
        group: Group = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.register_parameter("sinks", None)
        self.pattern = pattern() if pattern is not None else None
        self.position = position() if position is not None else None
        self.is_causal = is_causal
        self.dropout = dropout
        self.group = group

    def sees_all(self, document_ids_BS: Tensor | None) -> bool:
        """Return True if nothing but products and causality decides how a token sees another."""
        changes_scores = self.position is not None or self.softcap is not None or self.sinks is not None
        return not changes_scores and self.pattern is None and document_ids_BS is None

    def hidden_keys(
        self, num_queries: int, num_keys: int, document_ids_BS: Tensor | None, device: torch.device
    ) -> Tensor:
        """Return masked_out [B or 1, N or 1, S, T]."""
        return hidden_keys(
            num_queries, num_keys, document_ids_BS, device, self.pattern, is_causal=self.is_causal
        )

    def bias_by_distance(self, num_keys: int, device: torch.device) -> tuple[Tensor, int]:
        """Return bias_NR of the relative position by distance, and the index of distance 0.

        Negative distances, those to later keys, are left out if these are hidden.
        """
        zero = 0 if self.is_causal else num_keys - 1
        distance_R = torch.arange(-zero, num_keys, device=device)
        return self.position(distance_R), zero  # type: ignore[misc]

    def bias_of_scores(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """Return bias_NST of the relative position; values for hidden later keys are undefined."""
        bias_NR, zero = self.bias_by_distance(num_keys, device)
        query_S1 = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
        distance_ST = query_S1 - torch.arange(num_keys, device=device)
        return bias_NR[:, (distance_ST + zero).clamp(min=0)]

    def hidden_rows(self, span: Span) -> Tensor:
        """Return True for stored rows that a new token does not see, [B, 1 or N, T]."""
        hidden_B1T = span.hidden().unsqueeze(1)
        if self.pattern is None:
            return hidden_B1T
        device = hidden_B1T.device
        head_N1 = torch.arange(self.pattern.num_masks, device=device).unsqueeze(1)
        key_T = torch.arange(span.num_keys, device=device)
        return hidden_B1T | ~self.pattern(head_N1, span.positions[:, None, None], key_T)

    def bias_of_rows(self, span: Span) -> Tensor:
        """Return bias_BNT of the relative position; values for hidden rows are undefined."""
        device = span.positions.device
        bias_NR, zero = self.bias_by_distance(span.num_keys, device)
        distance_BT = span.positions.unsqueeze(1) - torch.arange(span.num_keys, device=device)
        return bias_NR[:, (distance_BT + zero).clamp(min=0)].transpose(0, 1)


class DenseCore(Core):
    """Computes softmax(scale query key^T + bias) value with torch's attention, without softcap and sinks."""

    def forward(
        self, query_SBNK: Tensor, key_TBNK: Tensor, value_TBNK: Tensor, document_ids_BS: Tensor | None = None
    ) -> Tensor:
        """Return context_SBNK; with T > S the queries are the last S tokens. Heads may share keys."""
        inputs, options = self.arguments(query_SBNK, key_TBNK, value_TBNK, document_ids_BS)
        attend = partial(functional.scaled_dot_product_attention, *inputs, **options)
        is_random = options["dropout_p"] > 0.0
        context = in_split_stream(self.group, query_SBNK.device, attend) if is_random else attend()
        return context.permute(2, 0, 1, 3)

    def arguments(
        self, query_SBNK: Tensor, key_TBNK: Tensor, value_TBNK: Tensor, document_ids_BS: Tensor | None = None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """Return the tensors and the options of the call of scaled_dot_product_attention in `forward`."""
        mask = self._mask(query_SBNK, len(key_TBNK), document_ids_BS)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBNK, key_TBNK, value_TBNK))
        return (query, key, value), {
            "attn_mask": mask,
            "dropout_p": self.dropout if self.training else 0.0,
            "is_causal": self.is_causal and mask is None and len(query_SBNK) == len(key_TBNK),
            "enable_gqa": query.shape[1] != key.shape[1],
            "scale": self.scale,
        }

    def attend_stored(self, query_BNK: Tensor, key_BGTK: Tensor, value_BGTK: Tensor, span: Span) -> Tensor:
        """Return context_BNK of one new token of each sequence over the stored rows of G key-value heads."""
        # Queries that share a key are as many queries of one head, so that no key is repeated.
        query_BGRK = query_BNK.unflatten(1, (key_BGTK.shape[1], -1))
        mask = self._mask_of_rows(span, query_BGRK)
        context_BGRK = functional.scaled_dot_product_attention(
            query_BGRK, key_BGTK, value_BGTK, attn_mask=mask, scale=self.scale
        )
        return context_BGRK.flatten(1, 2)

    def _mask_of_rows(self, span: Span, query_BGRK: Tensor) -> Tensor | None:
        """Return the mask of stored rows as a bias of scores, [B, 1 or G, 1 or R, T]; None: all are seen."""
        dtype, groups = query_BGRK.dtype, query_BGRK.shape[1]
        if self.pattern is None and self.position is None:
            return span.bias(dtype)
        hidden = self.hidden_rows(span)
        bias = torch.zeros(1, dtype=dtype, device=hidden.device)
        if self.position is not None:
            bias = self.bias_of_rows(span).to(dtype)
        bias = bias.masked_fill(hidden, float("-inf"))
        return bias.unsqueeze(1) if bias.shape[1] == 1 else bias.unflatten(1, (groups, -1))

    def _mask(self, query_SBNK: Tensor, num_keys: int, document_ids_BS: Tensor | None) -> Tensor | None:
        """Return the mask, boolean or as a bias of scores; None if `is_causal`, or no mask, suffices."""
        num_queries, device = len(query_SBNK), query_SBNK.device
        if self.sees_all(document_ids_BS) and (not self.is_causal or num_queries in (1, num_keys)):
            return None
        masked_out = self.hidden_keys(num_queries, num_keys, document_ids_BS, device)
        if self.position is None:
            return ~masked_out
        bias_NST = self.bias_of_scores(num_queries, num_keys, device)
        return bias_NST.to(query_SBNK.dtype).masked_fill(masked_out, float("-inf"))


def _plain_softmax(scores_BNST: Tensor, scale: float, masked_out: Tensor | None) -> Tensor:
    """Return the softmax with PyTorch's operators, without the keys that are masked out."""
    assert masked_out is not None, "SoftmaxCore.needs_mask"
    weights_BNST: Tensor = scaled_masked_softmax.reference(scores_BNST, masked_out, scale)
    return weights_BNST


class SoftmaxCore(Core):
    """Computes the same as DenseCore, also with softcap and sinks, with stored scores and a softmax operator.

    With a softcap or sinks the scores and their softmax are float32 also for inputs of 16 bits.

    Args:
        head_width: channels of a head.
        softmax: function of (scores_BNST, scale, masked_out or None) that leaves out the masked-out keys, and
            computes in float32; without masked_out, it hides later keys as `is_causal` states. None:
            PyTorch's operators.
        coefficient: scores are divided by it when computed and multiplied by it inside the softmax (layer
            scaling). A bias is added in between, as in GPT-NeoX, so it counts `coefficient` times.
        softcap: scores become softcap * tanh(scores / softcap); None: they do not.
        sinks: number of learned scores of the whole layer, one per head, that belong to no key; 0: none.
        options: arguments of Core.

    Source: arXiv:2408.00118 (softcap), arXiv:2508.10925 (sinks).
    """

    def __init__(
        self,
        *,
        head_width: int,
        softmax: Callable[[Tensor, float, Tensor | None], Tensor] | None = None,
        coefficient: float = 1.0,
        softcap: float | None = None,
        sinks: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.softmax = softmax or _plain_softmax
        self.needs_mask = softmax is None or sinks > 0
        self.multiplier = (self.scale or head_width**-0.5) / coefficient
        self.coefficient = coefficient
        self.softcap = softcap
        if sinks:
            self.sinks = logical_parameter((sinks,), init=zero_init, group=self.group, split_dim=0)

    def forward(
        self, query_SBNK: Tensor, key_TBNK: Tensor, value_TBNK: Tensor, document_ids_BS: Tensor | None = None
    ) -> Tensor:
        """Return context_SBNK; with T > S the queries are the last S tokens. Heads may share keys."""
        num_queries, num_keys, device = len(query_SBNK), len(key_TBNK), query_SBNK.device
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBNK, key_TBNK, value_TBNK))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        bias_NST = None if self.position is None else self.bias_of_scores(num_queries, num_keys, device)
        masked_out = None
        is_partly_seen = document_ids_BS is not None or self.pattern is not None or num_queries != num_keys
        if is_partly_seen or self.needs_mask:
            masked_out = self.hidden_keys(num_queries, num_keys, document_ids_BS, device)
        weights_BNST = self._weights(query, key, bias_NST, masked_out)
        if self.training and self.dropout > 0.0:
            drop = partial(functional.dropout, weights_BNST, self.dropout)
            weights_BNST = in_split_stream(self.group, device, drop)
        return (weights_BNST @ value).permute(2, 0, 1, 3)

    def attend_stored(self, query_BNK: Tensor, key_BGTK: Tensor, value_BGTK: Tensor, span: Span) -> Tensor:
        """Return context_BNK of one new token of each sequence over the stored rows of G key-value heads."""
        shared = query_BNK.shape[1] // key_BGTK.shape[1]
        key_BNTK, value_BNTK = (rows.repeat_interleave(shared, dim=1) for rows in (key_BGTK, value_BGTK))
        bias_BN1T = None if self.position is None else self.bias_of_rows(span).unsqueeze(2)
        hidden_BN1T = self.hidden_rows(span).unsqueeze(2)
        weights_BN1T = self._weights(query_BNK.unsqueeze(2), key_BNTK, bias_BN1T, hidden_BN1T)
        return (weights_BN1T @ value_BNTK).squeeze(2)

    def _weights(
        self, query_BNSK: Tensor, key_BNTK: Tensor, bias: Tensor | None, masked_out: Tensor | None
    ) -> Tensor:
        """Return weights_BNST of all keys, in the dtype of the products."""
        scores_BNST = (query_BNSK * self.multiplier) @ key_BNTK.transpose(-1, -2)
        dtype, num_keys = scores_BNST.dtype, scores_BNST.shape[-1]
        if self.softcap is not None:
            cap = self.softcap / self.coefficient
            scores_BNST = cap * torch.tanh(widen(scores_BNST) / cap)
        if bias is not None:
            scores_BNST = scores_BNST + bias.to(scores_BNST.dtype)
        if self.sinks is None:
            return self.softmax(scores_BNST, self.coefficient, masked_out).to(dtype)
        sink_N11 = widen(self.sinks)[:, None, None] / self.coefficient
        scores_BNSX = torch.cat((widen(scores_BNST), sink_N11.expand(*scores_BNST.shape[:-1], 1)), dim=-1)
        assert masked_out is not None, "with sinks it is always given"
        hidden = functional.pad(masked_out, (0, 1))
        return self.softmax(scores_BNSX, self.coefficient, hidden)[..., :num_keys].to(dtype)

"""Attention with patterns, documents and relative positions, and no tensor of queries by keys.

FlexAttention compiles the functions of places into its kernel and skips blocks of keys that are wholly
hidden. It has no dropout and, on a CPU, no backward pass; there `DenseCore` is used, the twin of this core.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from neox_model.layers.attention.dense import DenseCore
from neox_model.parallel.uncompiled import Uncompiled

__all__ = ["UNCOMPILED", "FlexCore"]


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


class FlexCore(DenseCore):
    """The same function as DenseCore, of whole windows, for devices that FlexAttention has kernels for.

    What it is no help for (queries that continue cached keys, and scores that need nothing but causality)
    goes the way of DenseCore.

    Args:
        is_compiled: False runs FlexAttention's own reference, which makes all scores (for tests).
        options: of a Core; dropout must be 0.
    """

    def __init__(self, *, is_compiled: bool = True, **options: Any) -> None:
        super().__init__(**options)
        assert self.dropout == 0.0, "FlexAttention has no dropout"
        self.is_compiled = is_compiled
        self._kept: tuple[tuple[int, torch.device], BlockMask] | None = None

    def forward(
        self, query_SBNK: Tensor, key_TBNK: Tensor, value_TBNK: Tensor, documents_BS: Tensor | None = None
    ) -> Tensor:
        """context_SBNK; with T > S the queries are the last S tokens, and several may share a key's head."""
        is_causal_alone = self.pattern is None and self.position is None and documents_BS is None
        if is_causal_alone or len(query_SBNK) != len(key_TBNK):
            return super().forward(query_SBNK, key_TBNK, value_TBNK, documents_BS)
        context_SBNK: Tensor = _by_flex_attention(self, query_SBNK, key_TBNK, value_TBNK, documents_BS)
        return context_SBNK

    def attend(
        self, query_SBNK: Tensor, key_TBNK: Tensor, value_TBNK: Tensor, documents_BS: Tensor | None
    ) -> Tensor:
        """context_SBNK by FlexAttention, whatever is asked."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBNK, key_TBNK, value_TBNK))
        attend: Any = _compiled(flex_attention) if self.is_compiled else flex_attention
        context_BNSK = attend(
            query,
            key,
            value,
            score_mod=self._score_mod(len(query_SBNK), query.device),
            block_mask=self._block_mask(len(query_SBNK), documents_BS, query.device),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return context_BNSK.permute(2, 0, 1, 3)

    def _block_mask(self, length: int, documents_BS: Tensor | None, device: torch.device) -> BlockMask:
        """Which blocks are visible, wholly or in part; the same for every batch where it has no documents."""
        make = _compiled(create_block_mask) if self.is_compiled else create_block_mask
        heads = self.pattern.num_masks if self.pattern is not None and self.pattern.num_masks > 1 else None
        if documents_BS is not None:
            batch = documents_BS.shape[0]
            return make(_mask_mod(self.pattern, documents_BS), batch, heads, length, length, device=device)
        if self._kept is None or self._kept[0] != (length, device):
            mask = make(_mask_mod(self.pattern, None), None, heads, length, length, device=device)
            self._kept = ((length, device), mask)
        return self._kept[1]

    def _score_mod(self, length: int, device: torch.device) -> Callable[..., Tensor] | None:
        if self.position is None:
            return None
        bias_NT = self.position(length, device)

        def add_bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + bias_NT[head, (query - key).clamp(min=0)]

        return add_bias


def _mask_mod(pattern: nn.Module | None, documents_BS: Tensor | None) -> Callable[..., Tensor]:
    """Whether a place is visible, for a sample, a head, a query and a key."""

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = key <= query
        if pattern is not None:
            visible = visible & pattern(head, query, key)
        if documents_BS is not None:
            visible = visible & (documents_BS[batch, query] == documents_BS[batch, key])
        return visible

    return is_visible


# It compiles by itself, and keeps what it has made.
_by_flex_attention = Uncompiled(FlexCore.attend)
UNCOMPILED = (_by_flex_attention,)

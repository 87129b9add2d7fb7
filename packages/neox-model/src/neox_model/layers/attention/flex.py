"""Attention with patterns, documents and relative positions, without a tensor of queries by keys.

FlexAttention compiles the functions of positions into its kernel and skips blocks of keys that are entirely
masked. It has no dropout and, on a CPU, no backward pass; the reference implementations, `DenseCore` and
`SoftmaxCore`, are used then.
"""

import importlib
from collections import deque
from collections.abc import Callable, Hashable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neox_kernels.precision import widen
from neox_model.layers.attention.dense import Core, DenseCore, SoftmaxCore
from neox_model.parallel.compile_disabled import CompileDisabled

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["COMPILE_DISABLED", "DocumentMasks", "FlexBase", "FlexCore", "FlexScoresCore"]


def _torch_flex() -> Any:
    """Return torch's module, whose import takes seconds (sympy), when it is used."""
    return importlib.import_module("torch.nn.attention.flex_attention")


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


class DocumentMasks:
    """Block masks of document ids, made once per micro-batch for all layers with the same pattern.

    Document ids are recognized by their memory, which checkpointed segments keep: those of the latest
    micro-batches are kept here, so that no other tensor can have it. They must not be changed in place.

    Args:
        passes: number of forward passes whose masks are kept; those that wait for their backward pass.
    """

    def __init__(self, passes: int = 1) -> None:
        self._kept: deque[tuple[Tensor, dict[Hashable, BlockMask]]] = deque(maxlen=passes)

    def of(self, document_ids_BS: Tensor, pattern: Hashable, make: "Callable[[], BlockMask]") -> "BlockMask":
        """Return the mask of these documents for a pattern, made by `make` unless it is known."""
        masks = next((masks for ids_BS, masks in self._kept if _is_same(ids_BS, document_ids_BS)), None)
        if masks is None:
            masks = {}
            self._kept.append((document_ids_BS, masks))
        if pattern not in masks:
            masks[pattern] = make()
        return masks[pattern]


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are the same values in the same memory."""
    return (one.data_ptr(), one.shape, one.stride(), one.dtype, one.device) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
        other.dtype,
        other.device,
    )


class FlexBase(Core):
    """Computes the same as the core behind it on whole windows, on devices supported by FlexAttention.

    That core is used for queries that continue cached keys, and for attention that requires no mask.

    Args:
        masks: the masks of documents, shared by the layers of a model; None: of this layer alone.
        is_compiled: False: run FlexAttention's reference implementation, which stores all scores (for tests).
        options: arguments of the core behind it; dropout must be 0.
    """

    def __init__(
        self, *, masks: DocumentMasks | None = None, is_compiled: bool = True, **options: Any
    ) -> None:
        super().__init__(**options)
        assert self.dropout == 0.0, "FlexAttention has no dropout"
        self.is_compiled = is_compiled
        self.is_dense = False
        self._masks = masks or DocumentMasks()
        self._kept: tuple[tuple[int, torch.device], BlockMask] | None = None

    def forward(
        self, query_SBNK: Tensor, key_TBNK: Tensor, value_TBNK: Tensor, document_ids_BS: Tensor | None = None
    ) -> Tensor:
        """Return context_SBNK; with T > S the queries are the last S tokens. Heads may share keys."""
        if self.is_dense or self.sees_all(document_ids_BS) or len(query_SBNK) != len(key_TBNK):
            dense_SBNK: Tensor = super().forward(query_SBNK, key_TBNK, value_TBNK, document_ids_BS)
            return dense_SBNK
        context_SBNK: Tensor = _by_flex_attention(self, query_SBNK, key_TBNK, value_TBNK, document_ids_BS)
        return context_SBNK

    def attend(
        self, query_SBNK: Tensor, key_TBNK: Tensor, value_TBNK: Tensor, document_ids_BS: Tensor | None
    ) -> Tensor:
        """Return context_SBNK computed by FlexAttention."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBNK, key_TBNK, value_TBNK))
        attend = _torch_flex().flex_attention
        attend = _compiled(attend) if self.is_compiled else attend
        context_BNSK, aux = attend(
            query,
            key,
            value,
            score_mod=self._score_mod(len(query_SBNK), query.device),
            block_mask=self._block_mask(len(query_SBNK), document_ids_BS, query.device),
            enable_gqa=query.shape[1] != key.shape[1],
            scale=self.scale,
            return_aux=_torch_flex().AuxRequest(lse=self.sinks is not None),
        )
        if self.sinks is not None:
            # The share of the tokens in a softmax with one more score.
            share_BNS = torch.sigmoid(aux.lse - widen(self.sinks).unsqueeze(1))
            context_BNSK = (context_BNSK * share_BNS.unsqueeze(-1)).to(context_BNSK.dtype)
        return context_BNSK.permute(2, 0, 1, 3)

    def _block_mask(
        self, length: int, document_ids_BS: Tensor | None, device: torch.device
    ) -> "BlockMask | None":
        """Return the block mask, made once for each micro-batch, or once if there are no document ids.

        Without causality, pattern and documents there is none.
        """
        if not self.is_causal and self.pattern is None and document_ids_BS is None:
            return None
        make = _torch_flex().create_block_mask
        make = _compiled(make) if self.is_compiled else make
        heads = self.pattern.num_masks if self.pattern is not None and self.pattern.num_masks > 1 else None
        if document_ids_BS is not None:
            visible, batch = self._mask_mod(document_ids_BS), document_ids_BS.shape[0]
            key = (self.is_causal, None if self.pattern is None else self.pattern.key)
            return self._masks.of(
                document_ids_BS, key, lambda: make(visible, batch, heads, length, length, device=device)
            )
        if self._kept is None or self._kept[0] != (length, device):
            mask = make(self._mask_mod(None), None, heads, length, length, device=device)
            self._kept = ((length, device), mask)
        return self._kept[1]

    def _score_mod(self, length: int, device: torch.device) -> Callable[..., Tensor] | None:
        if self.position is None and self.softcap is None:
            return None
        cap = self.softcap
        bias_NR, zero = (None, 0) if self.position is None else self.bias_by_distance(length, device)

        def changed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            if bias_NR is not None:
                score = score + bias_NR[head, (query - key + zero).clamp(min=0)]
            return score

        return changed

    def _mask_mod(self, document_ids_BS: Tensor | None) -> Callable[..., Tensor]:
        """Return a function of (sample, head, query, key) that is True if the query sees the key."""
        pattern, is_causal = self.pattern, self.is_causal

        def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            visible = key <= query if is_causal else key >= 0
            if pattern is not None:
                visible = visible & pattern(head, query, key)
            if document_ids_BS is not None:
                visible = visible & (document_ids_BS[batch, query] == document_ids_BS[batch, key])
            return visible

        return is_visible


class FlexCore(FlexBase, DenseCore):
    """Computes the same as DenseCore."""


class FlexScoresCore(FlexBase, SoftmaxCore):
    """Computes the same as SoftmaxCore, whose coefficient must be 1."""


# It compiles and caches its own graphs.
_by_flex_attention = CompileDisabled(FlexBase.attend)
COMPILE_DISABLED = (_by_flex_attention,)

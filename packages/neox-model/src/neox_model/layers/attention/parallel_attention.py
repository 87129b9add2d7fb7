"""Multi-head attention with heads split over tensor-parallel ranks.

One projection computes query, key and value, with outputs ordered by head (query, key, value of head 0, then
of head 1), so that a split by columns is a split by whole heads. This is the order of GPT-NeoX's weights.
With fewer key-value heads than query heads the order is by group: the queries that share a key, then the key
and its value.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from neox_model.errors import LayoutError
from neox_model.layers.cache import Cached, Chunk
from neox_model.parallel.compile_disabled import CompileDisabled
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.linear import ColumnParallelLinear, RowParallelLinear
from neox_model.parallel.logical import InitMethod, RowBlocks
from neox_model.parallel.low_rank import LowRank
from neox_model.parallel.sequence import TPInput, gather_input

__all__ = ["COMPILE_DISABLED", "ParallelAttention"]


def _checkpointed(core: nn.Module, *inputs: Tensor | None) -> Tensor:
    context_SBNK: Tensor = checkpoint(core, *inputs, use_reentrant=False)
    return context_SBNK


_recomputed = CompileDisabled(_checkpointed)
COMPILE_DISABLED = (_recomputed,)

_NO_ADAPTERS: Mapping[str, LowRank] = MappingProxyType({})


class ParallelAttention(Cached):
    """Computes dense(core(query, key, value)), or dense(sigmoid(gate(x)) * core(query, key, value)).

    Args:
        hidden_size: model width.
        heads: number of heads of the whole layer.
        core: factory of the core (see DenseCore).
        recomputes_core: compute the core again in the backward pass, from query, key and value.
        init: fills the query-key-value weight.
        output_init: fills the output weight.
        head_width: channels of a head; None: hidden_size / heads.
        key_value_heads: number of key-value heads, each shared by heads / key_value_heads queries; None: one
            per head.
        position: factory of the query-key position (rotary); None: no query-key position.
        qk_norm: factory of the norms of queries and keys, before their positions; None: no norms. With them,
            the position does not split the projection itself.
        qkv_bias: use a bias in the query-key-value projection.
        output_bias: use a bias in the output projection.
        skip_bias: return the bias of the output instead of adding it.
        gate_width: outputs of the gate, one per head or one per channel of each head; 0: no gate.
        group: the ranks over which the heads are split.
        adapters: forms of low-rank adapters by the name of the matrix, `qkv` or `dense`.

    Raises:
        LayoutError: the heads do not divide the width and head_width is None, or the ranks do not divide the
            heads.

    Source: arXiv:2305.13245 (grouped queries), arXiv:2505.06708 (gate).
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        core: Callable[[], nn.Module],
        init: InitMethod,
        output_init: InitMethod,
        head_width: int | None = None,
        key_value_heads: int | None = None,
        position: Callable[[], nn.Module] | None = None,
        qk_norm: Callable[[], nn.Module] | None = None,
        qkv_bias: bool = True,
        output_bias: bool = True,
        skip_bias: bool = False,
        gate_width: int = 0,
        recomputes_core: bool = False,
        group: Group = SINGLE_RANK,
        adapters: Mapping[str, LowRank] = _NO_ADAPTERS,
    ) -> None:
        super().__init__()
        sharing = heads if key_value_heads is None else key_value_heads
        _check_heads(hidden_size if head_width is None else 0, heads, sharing, group)
        self.head_width = hidden_size // heads if head_width is None else head_width
        self.local_groups = sharing // group.size
        outputs = (heads + 2 * sharing) * self.head_width
        self.qkv = ColumnParallelLinear(
            hidden_size,
            outputs,
            init=init,
            bias=qkv_bias,
            group=group,
            adapter=adapters.get("qkv"),
            blocks=RowBlocks((heads // sharing, 1, 1), self.head_width),
        )
        self.qk_norm = qk_norm() if qk_norm is not None else None
        self.gate: ColumnParallelLinear | None = None
        if gate_width:
            self.gate = ColumnParallelLinear(hidden_size, gate_width, init=init, bias=False, group=group)
        self.position = position() if position is not None else None
        self.core = core()
        self.recomputes_core = recomputes_core
        self.dense = RowParallelLinear(
            heads * self.head_width,
            hidden_size,
            init=output_init,
            bias=output_bias,
            group=group,
            skip_bias=skip_bias,
            adapter=adapters.get("dense"),
        )

    def forward(
        self,
        hidden_SBD: Tensor,
        document_ids_BS: Tensor | None = None,
        position_ids_SB: Tensor | None = None,
        tp_input: TPInput | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, whole on every rank, and the bias if `skip_bias`, else None.

        Args:
            hidden_SBD: the input, or `tp_input.whole`.
            document_ids_BS: document ids; None: one document.
            position_ids_SB: positions of tokens that are not consecutive.
            tp_input: the input, which has entered the split; without `reduces` the output is this rank's part
                of a sum, and the bias is returned.
        """
        reduces = tp_input is None or tp_input.reduces
        if self.gate is not None and tp_input is None:
            tp_input = gather_input(hidden_SBD, self.qkv.group)
            hidden_SBD = tp_input.whole
        projected, _ = self.qkv(hidden_SBD, tp_input)
        length, batch = projected.shape[:2]
        cache = self.cache
        query_SBNK, key, value = self.heads(projected, position_ids_SB)
        if cache is not None and not isinstance(cache.window, Chunk):
            attend: Callable[..., Tensor] = self.core.attend_stored  # type: ignore[assignment]
            context_SBNK = cache.of_next_tokens(query_SBNK, (key, value), attend)
        else:
            if cache is not None:
                key, value = cache.rows_of_chunk(key, value)
            is_recomputed = self.recomputes_core and self.training and torch.is_grad_enabled()
            core = partial(_recomputed, self.core) if is_recomputed else self.core
            context_SBNK = core(query_SBNK, key, value, document_ids_BS)
        if self.gate is not None:
            gate, _ = self.gate(hidden_SBD, tp_input)
            context_SBNK = context_SBNK * gate.sigmoid().unflatten(-1, (context_SBNK.shape[2], -1))
        return self.dense(context_SBNK.reshape(length, batch, -1), reduces=reduces)

    def heads(
        self, projected: Tensor, position_ids_SB: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a projection, the first two with their positions."""
        cache = self.cache
        if self.position is not None and cache is None and position_ids_SB is None:
            parts: tuple[Tensor, Tensor, Tensor] | None = self.position.split(projected, self.local_groups)  # type: ignore[operator]
            if parts is not None:
                return parts
        groups = projected.view(*projected.shape[:2], self.local_groups, -1, self.head_width)
        query_SBNK = groups[:, :, :, :-2].flatten(2, 3)
        key, value = groups[:, :, :, -2], groups[:, :, :, -1]
        if self.qk_norm is not None:
            query_SBNK, key = self.qk_norm(query_SBNK, key)
        if self.position is not None:
            start = 0 if cache is None else cache.start
            places = position_ids_SB if cache is None else cache.position_ids
            query_SBNK, key = self.position(query_SBNK, key, start, places)
        return query_SBNK, key, value


def _check_heads(hidden_size: int, heads: int, key_value_heads: int, group: Group) -> None:
    if hidden_size % heads:
        raise LayoutError(
            f"hidden-size {hidden_size:,} is not divisible by {heads} heads; "
            "set num-attention-heads to a divisor of hidden-size"
        )
    if heads % key_value_heads:
        raise LayoutError(
            f"{heads} attention heads are not divisible by {key_value_heads} key-value heads; "
            "set num-kv-heads to a divisor of num-attention-heads"
        )
    if key_value_heads % group.size:
        raise LayoutError(
            f"{key_value_heads} attention heads cannot be split over {group.size} tensor-parallel ranks; "
            "set model-parallel-size to a divisor of num-attention-heads (and num-kv-heads)"
        )

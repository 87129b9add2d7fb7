"""Multi-head attention, heads split over tensor-parallel ranks: project, position, core, project back.

One projection makes query, key and value, its outputs ordered head by head (head 0's query, key, value,
then head 1's), so that a split by columns is a split by whole heads. This is the order of GPT-NeoX's
weights.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from neox_model.errors import LayoutError
from neox_model.parallel.groups import SINGLE, Group
from neox_model.parallel.linear import ColumnParallelLinear, RowParallelLinear
from neox_model.parallel.logical import InitMethod

__all__ = ["ParallelAttention"]


class Cache(Protocol):
    """What generation hangs into an attention layer (see kv_cache)."""

    length: int

    def extend(self, key_SBNK: Tensor, value_SBNK: Tensor) -> tuple[Tensor, Tensor]:
        """Append, and give all keys and values so far."""


class ParallelAttention(nn.Module):
    """dense(core(query, key, value)).

    Args:
        hidden_size: model width.
        heads: number of heads in all.
        core: makes the core (see CORES).
        init: fills the query-key-value weight.
        output_init: fills the output weight.
        position: makes the query-key position (rotary); None for none.
        bias: whether the projections have one.
        skip_bias: give the output's back unadded.
        group: the ranks the heads are split over.

    Raises:
        LayoutError: the heads do not divide the width, or the ranks the heads.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        core: Callable[[], nn.Module],
        init: InitMethod,
        output_init: InitMethod,
        position: Callable[[], nn.Module] | None = None,
        bias: bool = True,
        skip_bias: bool = False,
        group: Group = SINGLE,
    ) -> None:
        super().__init__()
        _check_heads(hidden_size, heads, group)
        self.local_heads = heads // group.size
        self.head_width = hidden_size // heads
        self.qkv = ColumnParallelLinear(hidden_size, 3 * hidden_size, init=init, bias=bias, group=group)
        self.position = position() if position is not None else None
        self.core = core()
        self.dense = RowParallelLinear(
            hidden_size, hidden_size, init=output_init, bias=bias, group=group, skip_bias=skip_bias
        )
        self.cache: Cache | None = None

    def forward(self, hidden_SBD: Tensor, documents_BS: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The output, whole on every rank, and the bias still to be added, if any."""
        projected, _ = self.qkv(hidden_SBD)
        length, batch = hidden_SBD.shape[:2]
        heads_SBN3K = projected.view(length, batch, self.local_heads, 3, self.head_width)
        query, key, value = heads_SBN3K.unbind(dim=3)
        if self.position is not None:
            query, key = self.position(query, key, 0 if self.cache is None else self.cache.length)
        if self.cache is not None:
            key, value = self.cache.extend(key, value)
        context_SBNK = self.core(query, key, value, documents_BS)
        return self.dense(context_SBNK.reshape(length, batch, -1))


def _check_heads(hidden_size: int, heads: int, group: Group) -> None:
    if hidden_size % heads:
        raise LayoutError(
            f"hidden-size {hidden_size:,} does not divide into {heads} heads; "
            "choose num-attention-heads that divides it"
        )
    if heads % group.size:
        raise LayoutError(
            f"{heads} attention heads cannot be shared out to {group.size} tensor-parallel ranks; "
            "choose a model-parallel-size that divides num-attention-heads"
        )

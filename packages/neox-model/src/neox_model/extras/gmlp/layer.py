"""A layer that mixes positions by a learned matrix instead of attention (gMLP); lower-triangular if causal.

    x + down(u * gate(v)),  u and v = activation of two projections of norm(x), each 4 hidden wide

u and v are two matrices, each split over tensor-parallel ranks separately, so that every layout is the same
model. In GPT-NeoX's form they are [u; v], one projection of width 8 hidden.

Source: arXiv:2105.08050, sections 2.1 and 4.3 (amlp: the gate with a tiny attention).
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from neox_model.layers.attention.dense import DenseCore
from neox_model.layers.cache import Cached, Chunk, Span
from neox_model.layers.residual_layer import ResidualLayer
from neox_model.parallel.collectives import gather_from_group, scatter_to_group
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.linear import ColumnParallelLinear, RowParallelLinear, one_init, zero_init
from neox_model.parallel.logical import InitMethod, logical_parameter
from neox_model.parallel.partial_gradients import mark_partial
from neox_model.parallel.sequence import gather_input

__all__ = ["GMLPLayer", "SpatialGate", "SpatialMLP", "TinyAttention"]


class TinyAttention(nn.Module):
    """One attention head over all channels of u and v, added to the gate.

    Every tensor-parallel rank computes the head; its input and output are split.

    Args:
        width: channels of u, and of v.
        head_width: channels of query, key and value.
        init: fills the input projections.
        output_init: fills the output projection.
        bias: use biases in the projections.
        is_causal: later tokens are hidden.
        dropout: dropout probability of attention weights.
        group: the ranks over which the channels are split.
    """

    def __init__(
        self,
        width: int,
        head_width: int,
        *,
        init: InitMethod,
        output_init: InitMethod,
        bias: bool = True,
        is_causal: bool = True,
        dropout: float = 0.0,
        group: Group = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.from_u = RowParallelLinear(width, 3 * head_width, init=init, group=group, bias=bias)
        self.from_v = RowParallelLinear(width, 3 * head_width, init=init, group=group, bias=False)
        self.core = DenseCore(is_causal=is_causal, dropout=dropout)
        self.out = ColumnParallelLinear(head_width, width, init=output_init, group=group, bias=bias)

    def project(self, u_SBF: Tensor, v_SBF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, each [S, B, 1 head, head width]."""
        projected = self.from_u(u_SBF)[0] + self.from_v(v_SBF)[0]
        query, key, value = projected.unsqueeze(2).chunk(3, dim=-1)
        return query, key, value

    def forward(self, query: Tensor, key: Tensor, value: Tensor, document_ids_BS: Tensor | None) -> Tensor:
        """Return the output to add to the gate, [S, B, channels of this rank]."""
        return self.out(self.core(query, key, value, document_ids_BS).squeeze(2))[0]

    def of_next(self, query_B1K: Tensor, key_B1TK: Tensor, value_B1TK: Tensor, span: Span) -> Tensor:
        """Return the same for one new token of each sequence, [B, channels of this rank]."""
        return self.out(self.core.attend_stored(query_B1K, key_B1TK, value_B1TK, span).squeeze(1))[0]


class SpatialGate(Cached):
    """Computes gate(v) = W norm(v) + b over positions, plus the tiny attention.

    Args:
        width: channels of v.
        length: positions that W mixes, the longest window.
        norm: factory of the norm over v's channels, called with their number.
        attention: factory of the tiny attention; None: no attention.
        is_causal: W is lower-triangular.
        group: the ranks over which the channels are split.
    """

    def __init__(
        self,
        width: int,
        length: int,
        *,
        norm: Callable[[int], nn.Module],
        attention: Callable[[], TinyAttention] | None = None,
        is_causal: bool = True,
        group: Group = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.group = group
        self.is_causal = is_causal
        self.norm = norm(width)
        self.weight = logical_parameter((length, length), init=zero_init)
        self.bias = logical_parameter((length,), init=one_init)
        if group.size > 1:
            # Each rank mixes its channels with the whole matrix.
            mark_partial(self.weight, group)
            mark_partial(self.bias, group)
        self.attention = attention() if attention is not None else None

    def forward(self, u_SBF: Tensor, v_SBF: Tensor, document_ids_BS: Tensor | None = None) -> Tensor:
        """Return `u` times the gate, [S, B, channels of this rank]."""
        whole_SBF = self.norm(gather_from_group(v_SBF, self.group))
        rows: tuple[Tensor, ...] = (scatter_to_group(whole_SBF, self.group).unsqueeze(2),)
        query = rows[0]
        if self.attention is not None:
            query, *key_value = self.attention.project(u_SBF, v_SBF)
            rows += tuple(key_value)
        cache = self.cache
        if cache is not None and not isinstance(cache.window, Chunk):
            return u_SBF * cache.of_next_tokens(query, rows, self._gate_of_next)
        if cache is not None:
            rows = cache.rows_of_chunk(*rows)
        gate_SBF = self._mix(rows[0].squeeze(2), len(v_SBF), document_ids_BS)
        if self.attention is not None:
            gate_SBF = gate_SBF + self.attention(query, rows[1], rows[2], document_ids_BS)
        return u_SBF * gate_SBF

    def _gate_of_next(self, query_B1K: Tensor, v_B1TF: Tensor, *others: Any) -> Tensor:
        """Return the gate of one new token of each sequence, [B, channels of this rank].

        The others are the stored keys and values, if there is an attention, and the span of the sequences.
        """
        span = others[-1]
        weight_BT = self.weight[span.positions, : span.num_keys].masked_fill(span.hidden(), 0.0)
        mixed_B1F = weight_BT.to(v_B1TF.dtype).unsqueeze(1) @ v_B1TF.squeeze(1)
        gate_BF = mixed_B1F.squeeze(1) + self.bias[span.positions, None].to(v_B1TF.dtype)
        if self.attention is not None:
            gate_BF = gate_BF + self.attention.of_next(query_B1K, others[0], others[1], span)
        return gate_BF

    def _mix(self, v_TBF: Tensor, num_rows: int, document_ids_BS: Tensor | None) -> Tensor:
        """Return the last rows of W v + b, without mixing across documents."""
        stop = len(v_TBF)
        start = stop - num_rows
        weight_ST = self.weight[start:stop, :stop]
        weight_ST = (weight_ST.tril(start) if self.is_causal else weight_ST).to(v_TBF.dtype)
        if document_ids_BS is None:
            mixed_SBF = (weight_ST @ v_TBF.flatten(1)).unflatten(1, v_TBF.shape[1:])
        else:
            is_same = document_ids_BS[:, start:].unsqueeze(2) == document_ids_BS.unsqueeze(1)
            mixed_SBF = ((weight_ST * is_same) @ v_TBF.transpose(0, 1)).transpose(0, 1)
        return mixed_SBF + self.bias[start:stop, None, None].to(v_TBF.dtype)


class SpatialMLP(nn.Module):
    """Computes down(u * gate(v)).

    Args:
        hidden_size: width of input and output.
        gate: factory of the gate over 4 hidden_size channels.
        activation: elementwise activation of both projections.
        init: fills `up` and `up_gate`.
        output_init: fills `down`.
        bias: use biases in the projections.
        skip_bias: return the bias of `down` instead of adding it.
        group: the ranks over which the channels are split.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        gate: Callable[[], SpatialGate],
        activation: Callable[[Tensor], Tensor],
        init: InitMethod,
        output_init: InitMethod,
        bias: bool = True,
        skip_bias: bool = False,
        group: Group = SINGLE_RANK,
    ) -> None:
        super().__init__()
        width = 4 * hidden_size
        self.activation = activation
        self.up = ColumnParallelLinear(hidden_size, width, init=init, bias=bias, group=group)
        self.up_gate = ColumnParallelLinear(hidden_size, width, init=init, bias=bias, group=group)
        self.gate = gate()
        self.down = RowParallelLinear(
            width, hidden_size, init=output_init, bias=bias, group=group, skip_bias=skip_bias
        )

    def forward(self, hidden_SBD: Tensor, document_ids_BS: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the bias if `skip_bias`, else None."""
        tp_input = gather_input(hidden_SBD, self.up.group)
        u_SBF = self.activation(self.up(tp_input.whole, tp_input)[0])
        v_SBF = self.activation(self.up_gate(tp_input.whole, tp_input)[0])
        return self.down(self.gate(u_SBF, v_SBF, document_ids_BS))


class GMLPLayer(ResidualLayer):
    """Computes x + dropout(mlp(norm(x))).

    Args:
        mlp: factory of the MLP, which is called with (hidden_SBD, document_ids_BS or None).
        options: arguments of ResidualLayer.
    """

    def __init__(self, *, mlp: Callable[[], SpatialMLP], **options: Any) -> None:
        super().__init__(**options)
        self.mlp = mlp()

    def block(self, hidden_SBD: Tensor, document_ids_BS: Tensor | None) -> Tensor:
        """Add the MLP's output to the residual stream."""
        hidden_SBD, normed_SBD = self._enter(self.norm1, hidden_SBD)
        residual_SBD = normed_SBD if self.residual_after_norm else hidden_SBD
        return self._add(residual_SBD, self.mlp(normed_SBD, document_ids_BS))

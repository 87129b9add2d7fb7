"""Feed-forward layers: up, activation, down; a gated MLP has a second input projection, `gate`.

The two projections of a gated MLP are two matrices (`up`, `gate`), each split over ranks separately, so that
every layout is the same model. In GPT-NeoX's form they are [up; gate]: the first half is multiplied by the
activation of the second half.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.linear import ColumnParallelLinear, RowParallelLinear
from neox_model.parallel.logical import InitMethod
from neox_model.parallel.low_rank import LowRank
from neox_model.parallel.sequence import Entry, enter

__all__ = ["MLP", "GatedMLP"]

_NO_ADAPTERS: Mapping[str, LowRank] = MappingProxyType({})


class MLP(nn.Module):
    """Computes down(activation(up(x))).

    Args:
        hidden_size: width of input and output.
        mlp_width: width between the projections.
        activation: elementwise activation.
        bias_activation: fused function of (x, bias) that adds the bias and activates; replaces `activation`.
        init: fills `up`.
        output_init: fills `down`.
        bias: use biases in the projections.
        skip_bias: return the bias of `down` instead of adding it.
        group: the ranks over which the intermediate width is split.
        adapters: forms of low-rank adapters by the name of the matrix.
    """

    def __init__(
        self,
        hidden_size: int,
        mlp_width: int,
        *,
        activation: Callable[[Tensor], Tensor],
        init: InitMethod,
        output_init: InitMethod,
        bias_activation: Callable[[Tensor, Tensor], Tensor] | None = None,
        bias: bool = True,
        skip_bias: bool = False,
        group: Group = SINGLE_RANK,
        adapters: Mapping[str, LowRank] = _NO_ADAPTERS,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.bias_activation = bias_activation if bias else None
        self.up = ColumnParallelLinear(
            hidden_size,
            mlp_width,
            init=init,
            bias=bias,
            group=group,
            skip_bias=self.bias_activation is not None,
            adapter=adapters.get("up"),
        )
        self.down = RowParallelLinear(
            mlp_width,
            hidden_size,
            init=output_init,
            bias=bias,
            group=group,
            skip_bias=skip_bias,
            adapter=adapters.get("down"),
        )

    def forward(self, hidden_SBD: Tensor, entry: Entry | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the bias if `skip_bias`, else None; `entry` as in ParallelAttention."""
        reduces = entry is None or entry.reduces
        wide_SBF, bias = self.up(hidden_SBD, entry)
        if self.bias_activation is not None:
            return self.down(self.bias_activation(wide_SBF, bias), reduces=reduces)
        return self.down(self.activation(wide_SBF), reduces=reduces)


class GatedMLP(nn.Module):
    """Computes down(up(x) * activation(gate(x))).

    Args:
        hidden_size: width of input and output.
        mlp_width: width between the projections.
        activation: elementwise activation of the gate.
        gated_activation: fused function of (up, gate, up's bias or None, gate's bias or None) that adds the
            biases, activates the gate and multiplies; replaces `activation`.
        init: fills `up` and `gate`.
        output_init: fills `down`.
        bias: use biases in the projections.
        skip_bias: return the bias of `down` instead of adding it.
        group: the ranks over which the intermediate width is split.
        adapters: forms of low-rank adapters by the name of the matrix.

    Source: arXiv:2002.05202.
    """

    def __init__(
        self,
        hidden_size: int,
        mlp_width: int,
        *,
        activation: Callable[[Tensor], Tensor],
        init: InitMethod,
        output_init: InitMethod,
        gated_activation: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor] | None = None,
        bias: bool = True,
        skip_bias: bool = False,
        group: Group = SINGLE_RANK,
        adapters: Mapping[str, LowRank] = _NO_ADAPTERS,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gated_activation = gated_activation
        options: dict[str, Any] = {
            "init": init,
            "bias": bias,
            "group": group,
            "skip_bias": gated_activation is not None,
        }
        self.up = ColumnParallelLinear(hidden_size, mlp_width, **options, adapter=adapters.get("up"))
        self.gate = ColumnParallelLinear(hidden_size, mlp_width, **options, adapter=adapters.get("gate"))
        self.down = RowParallelLinear(
            mlp_width,
            hidden_size,
            init=output_init,
            bias=bias,
            group=group,
            skip_bias=skip_bias,
            adapter=adapters.get("down"),
        )

    def forward(self, hidden_SBD: Tensor, entry: Entry | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the bias if `skip_bias`, else None; `entry` as in ParallelAttention."""
        if entry is None:
            entry = enter(hidden_SBD, self.up.group)
            hidden_SBD = entry.whole
        up_SBF, up_bias = self.up(hidden_SBD, entry)
        gate_SBF, gate_bias = self.gate(hidden_SBD, entry)
        if self.gated_activation is not None:
            product_SBF = self.gated_activation(up_SBF, gate_SBF, up_bias, gate_bias)
        else:
            product_SBF = up_SBF * self.activation(gate_SBF)
        return self.down(product_SBF, reduces=entry.reduces)

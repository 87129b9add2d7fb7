"""The feed-forward half of a layer: up, activation, down; a gated one has a second projection beside `up`.

The two projections of a gated MLP are two matrices (`up`, `gate`), each split over ranks by itself, so that
every layout is the same model. Joined for GPT-NeoX they are [up; gate]: its first half is multiplied by the
activation of its last half.
"""

from collections.abc import Callable

from torch import Tensor, nn

from neox_model.parallel.groups import SINGLE, Group
from neox_model.parallel.linear import ColumnParallelLinear, RowParallelLinear
from neox_model.parallel.logical import InitMethod

__all__ = ["MLP", "GatedMLP"]


class MLP(nn.Module):
    """down(activation(up(x))).

    Args:
        hidden_size: width in and out.
        intermediate_size: width between.
        activation: elementwise function.
        bias_activation: function of (x, bias) that adds and activates in one; replaces `activation`.
        init: fills `up`.
        output_init: fills `down`.
        bias: whether the projections have one.
        skip_bias: give `down`'s back unadded.
        group: the ranks the intermediate width is split over.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Callable[[Tensor], Tensor],
        init: InitMethod,
        output_init: InitMethod,
        bias_activation: Callable[[Tensor, Tensor], Tensor] | None = None,
        bias: bool = True,
        skip_bias: bool = False,
        group: Group = SINGLE,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.bias_activation = bias_activation if bias else None
        self.up = ColumnParallelLinear(
            hidden_size,
            intermediate_size,
            init=init,
            bias=bias,
            group=group,
            skip_bias=self.bias_activation is not None,
        )
        self.down = RowParallelLinear(
            intermediate_size, hidden_size, init=output_init, bias=bias, group=group, skip_bias=skip_bias
        )

    def forward(self, hidden_SBD: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output, and the bias still to be added, if any."""
        wide_SBF, bias = self.up(hidden_SBD)
        if self.bias_activation is not None:
            return self.down(self.bias_activation(wide_SBF, bias))
        return self.down(self.activation(wide_SBF))


class GatedMLP(nn.Module):
    """down(up(x) * activation(gate(x))).

    Args:
        hidden_size: width in and out.
        intermediate_size: width between.
        activation: elementwise function of the gate.
        init: fills `up` and `gate`.
        output_init: fills `down`.
        bias: whether the projections have one.
        skip_bias: give `down`'s back unadded.
        group: the ranks the intermediate width is split over.

    Source: arXiv:2002.05202.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Callable[[Tensor], Tensor],
        init: InitMethod,
        output_init: InitMethod,
        bias: bool = True,
        skip_bias: bool = False,
        group: Group = SINGLE,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = ColumnParallelLinear(hidden_size, intermediate_size, init=init, bias=bias, group=group)
        self.gate = ColumnParallelLinear(hidden_size, intermediate_size, init=init, bias=bias, group=group)
        self.down = RowParallelLinear(
            intermediate_size, hidden_size, init=output_init, bias=bias, group=group, skip_bias=skip_bias
        )

    def forward(self, hidden_SBD: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output, and the bias still to be added, if any."""
        up_SBF, _ = self.up(hidden_SBD)
        gate_SBF, _ = self.gate(hidden_SBD)
        return self.down(up_SBF * self.activation(gate_SBF))

"""Feed-forward layers: up, activation, down; a gated MLP has a second input projection, `gate`.

The two projections of a gated MLP are two matrices (`up`, `gate`), each split over ranks separately, so that
every layout is the same model. In GPT-NeoX's form they are [up; gate]: the first half is multiplied by the
activation of the second half.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.linear import ColumnParallelLinear, RowParallelLinear
from neox_model.parallel.logical import InitMethod
from neox_model.parallel.low_rank import LowRank
from neox_model.parallel.sequence import TPInput, gather_input

__all__ = ["MLP", "GatedMLP"]

GatedActivation = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]

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

    def forward(self, hidden_SBD: Tensor, tp_input: TPInput | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the bias if `skip_bias`, else None; `tp_input` as in ParallelAttention."""
        reduces = tp_input is None or tp_input.reduces
        wide_SBF, bias = self.up(hidden_SBD, tp_input)
        if self.bias_activation is not None:
            return self.down(self.bias_activation(wide_SBF, bias), reduces=reduces)
        return self.down(self.activation(wide_SBF), reduces=reduces)


@dataclass(frozen=True, slots=True)
class _Gating:
    """How the product of up and gate is computed, and again with its gradients.

    Attributes:
        forward: function of (up, gate, up's bias or None, gate's bias or None).
        again: function of (gradient of the product, and the same) that returns the product, and the gradients
            of the four; None: autograd computes them.
    """

    forward: GatedActivation
    again: Callable[..., tuple[Tensor | None, ...]] | None

    def product_and_gradients(self, of_product: Tensor, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the product, and the gradients of what it is computed from."""
        if self.again is not None:
            return self.again(of_product, *given)
        leaves = [None if each is None else each.detach().requires_grad_() for each in given]
        with torch.enable_grad():
            product = self.forward(*leaves)  # type: ignore[arg-type]
        present = [leaf for leaf in leaves if leaf is not None]
        gradients = iter(torch.autograd.grad(product, present, of_product))
        return product.detach(), *(None if leaf is None else next(gradients) for leaf in leaves)


class _LinearOfProduct(torch.autograd.Function):
    """The product with a matrix of what is gated, which is computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        up: Tensor,
        gate: Tensor,
        up_bias: Tensor | None,
        gate_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        gating: _Gating,
    ) -> Tensor:
        ctx.save_for_backward(up, gate, up_bias, gate_bias, weight)
        ctx.gating = gating
        return functional.linear(gating.forward(up, gate, up_bias, gate_bias), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *given, weight = ctx.saved_tensors
        product, *of_given = ctx.gating.product_and_gradients(gradient @ weight, *given)
        flat = gradient.flatten(0, -2)
        of_bias = flat.sum(dim=0) if ctx.needs_input_grad[5] else None
        return *of_given, flat.t() @ product.flatten(0, -2), of_bias, None


def _linear_of_product(
    gating: _Gating,
    gate: Tensor,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    up: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    # Under autocast weights are float32, and it does not affect functions that compute their own gradients.
    weight, bias = weight.to(up.dtype), None if bias is None else bias.to(up.dtype)
    result: Tensor = _LinearOfProduct.apply(up, gate, up_bias, gate_bias, weight, bias, gating)
    return result


class GatedMLP(nn.Module):
    """Computes down(up(x) * activation(gate(x))).

    Args:
        hidden_size: width of input and output.
        mlp_width: width between the projections.
        activation: elementwise activation of the gate.
        gated_activation: fused function of (up, gate, up's bias or None, gate's bias or None) that adds the
            biases, activates the gate and multiplies; replaces `activation`.
        gated_again: function of (gradient of the product, and the same) that returns the product, and the
            gradients of the four; None: autograd computes them.
        recomputes_product: keep up and gate for the backward pass, and compute their product again, except
            in compiled layers, where the compiler decides.
        adds_gradients: as for TPInput.
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
        gated_activation: GatedActivation | None = None,
        gated_again: Callable[..., tuple[Tensor | None, ...]] | None = None,
        recomputes_product: bool = False,
        adds_gradients: bool = False,
        bias: bool = True,
        skip_bias: bool = False,
        group: Group = SINGLE_RANK,
        adapters: Mapping[str, LowRank] = _NO_ADAPTERS,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gated_activation = gated_activation
        self.gated_again = gated_again
        self.recomputes_product = recomputes_product
        self.adds_gradients = adds_gradients
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

    def forward(self, hidden_SBD: Tensor, tp_input: TPInput | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the bias if `skip_bias`, else None; `tp_input` as in ParallelAttention."""
        if tp_input is None:
            tp_input = gather_input(hidden_SBD, self.up.group)
            hidden_SBD = tp_input.whole
        # Not what a hook of this module has put in its place.
        is_entered = hidden_SBD is tp_input.whole
        tp_input.adds_gradients = self.adds_gradients
        up_SBF, up_bias = self.up(hidden_SBD, tp_input)
        gate_SBF, gate_bias = self.gate(tp_input.whole if is_entered else hidden_SBD, tp_input)
        # Only the gradient of a trained matrix needs the product again.
        is_needed = torch.is_grad_enabled() and self.down.weight.requires_grad
        if self.recomputes_product and is_needed and not torch.compiler.is_compiling():
            gating = _Gating(self._product, self.gated_again)
            linear = partial(_linear_of_product, gating, gate_SBF, up_bias, gate_bias)
            return self.down(up_SBF, reduces=tp_input.reduces, product=linear)
        return self.down(self._product(up_SBF, gate_SBF, up_bias, gate_bias), reduces=tp_input.reduces)

    def _product(
        self, up_SBF: Tensor, gate_SBF: Tensor, up_bias: Tensor | None, gate_bias: Tensor | None
    ) -> Tensor:
        """Return up times the activation of the gate; only the fused function gets biases."""
        if self.gated_activation is not None:
            return self.gated_activation(up_SBF, gate_SBF, up_bias, gate_bias)
        return up_SBF * self.activation(gate_SBF)

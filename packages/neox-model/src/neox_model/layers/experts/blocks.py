"""The blocks of experts, whose matrices of one kind are one tensor [experts, inputs, outputs]."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_model.parallel.compile_disabled import CompileDisabled
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.linear import zero_init
from neox_model.parallel.logical import InitMethod, logical_parameter
from neox_model.parallel.low_rank import LowRank, LowRankPair
from neox_model.parallel.partial_gradients import ensure_partial

__all__ = [
    "COMPILE_DISABLED",
    "ExpertAdapter",
    "ExpertBlocks",
    "ExpertProduct",
    "grouped_product",
    "looped_product",
    "uncompiled_grouped_product",
]

# (rows [R, I] sorted by expert, weights [E, I, O], rows of each expert [E]) -> [R, O]
ExpertProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


class ExpertAdapter(LowRankPair):
    """The adapters of one matrix of all experts: alpha / rank * (x A) B is added to x W of a row's expert.

    A rank has a part of the sum over inputs, or of the gradient of the inputs, as without adapters. The
    gradient of the side that is not split is a sum over the ranks.

    Args:
        shape: the whole shape of the matrices: experts, inputs, outputs.
        form: rank, scale and dropout.
        product: computes products with the matrices of all experts.
        group: the ranks over which the matrices are split.
        experts: the ranks that divide the experts.
        splits_inputs: the inputs are split, else the outputs.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        form: LowRank,
        *,
        product: ExpertProduct,
        group: Group,
        experts: Group,
        splits_inputs: bool,
    ) -> None:
        number, inputs, outputs = shape
        whole = (number, inputs, form.rank), (number, form.rank, outputs)
        options: Any = {"splits_inputs": splits_inputs, "experts": experts}
        super().__init__(form, group, whole=whole, dims=(1, 2), **options)
        self.product = product
        ensure_partial(self.b if splits_inputs else self.a, group)

    def forward(self, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
        """Return what is added to the product of each row with its expert's matrix."""
        inner_RL = self.product(self._dropped(rows_RI, differ=self.splits_inputs), self.a, counts_E)
        return self.product(inner_RL, self.b, counts_E) * self.form.scale


class ExpertBlocks(nn.Module):
    """Computes down(activation(up(x))) of each row with its expert's matrices; gated ones as GatedMLP.

    Args:
        number: number of experts.
        hidden_size: width of input and output.
        width: width between the projections of an expert.
        activation: elementwise activation, of the gate if there is one.
        is_gated: experts have a second input projection, the gate.
        gated: function of up and gate; None: up * activation(gate).
        bias: the projections have biases, one row per expert.
        product: computes products with the matrices of all experts.
        init: fills `up` and `gate`.
        output_init: fills `down`.
        group: the ranks over which each expert's width is split.
        experts: the ranks that divide the experts.
        adapters: forms of low-rank adapters by the name of the matrix.
        adapter_product: computes products with the adapters' matrices.
    """

    def __init__(
        self,
        number: int,
        hidden_size: int,
        width: int,
        *,
        activation: Callable[[Tensor], Tensor],
        init: InitMethod,
        output_init: InitMethod,
        is_gated: bool = False,
        gated: Callable[[Tensor, Tensor], Tensor] | None = None,
        bias: bool = False,
        product: ExpertProduct | None = None,
        group: Group = SINGLE_RANK,
        experts: Group = SINGLE_RANK,
        adapters: Mapping[str, LowRank] = MappingProxyType({}),
        adapter_product: ExpertProduct | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gated = gated or (lambda up, gate: up * activation(gate))
        self.product = looped_product if product is None else product
        wide, narrow = (number, hidden_size, width), (number, width, hidden_size)
        parameter = partial(logical_parameter, group=group, experts=experts)
        self.up = parameter(wide, init=init, split_dim=2)
        self.gate = parameter(wide, init=init, split_dim=2) if is_gated else None
        self.down = parameter(narrow, init=output_init, split_dim=1)
        biases = partial(parameter, init=zero_init, is_biases=True)
        self.up_bias = biases((number, width), split_dim=1) if bias else None
        self.gate_bias = biases((number, width), split_dim=1) if bias and is_gated else None
        self.down_bias = biases((number, hidden_size), is_partial=True) if bias else None
        # Outputs are summed over ranks: the first adds it, and the gradient of the others is 0.
        self.down_share = float(group.rank == 0)
        shapes = {"up": wide, "gate": wide, "down": narrow}
        options: Any = {"product": adapter_product or looped_product, "group": group, "experts": experts}
        self.adapters = nn.ModuleDict(
            {
                name: ExpertAdapter(shapes[name], form, splits_inputs=name == "down", **options)
                for name, form in adapters.items()
                if getattr(self, name, None) is not None
            }
        )

    def forward(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Return the output of each row's expert; this rank's part of the sum over its width.

        Args:
            rows_RD: rows sorted by expert.
            counts_E: number of rows of each of this rank's experts; their sum is R.
        """
        places_RE = None if self.up_bias is None else _places(counts_E, rows_RD)
        wide_RF = _biased(self._product("up", rows_RD, counts_E), places_RE, self.up_bias)
        if self.gate is None:
            wide_RF = self.activation(wide_RF)
        else:
            gate_RF = self._product("gate", rows_RD, counts_E)
            wide_RF = self.gated(wide_RF, _biased(gate_RF, places_RE, self.gate_bias))
        rows_RD = self._product("down", wide_RF, counts_E)
        return _biased(rows_RD, places_RE, self.down_bias, share=self.down_share)

    def _product(self, name: str, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
        product_RO = self.product(rows_RI, getattr(self, name), counts_E)
        if name in self.adapters:
            product_RO = product_RO + self.adapters[name](rows_RI, counts_E)
        return product_RO


def _places(counts_E: Tensor, rows_RD: Tensor) -> Tensor:
    """Return 1 for the expert of each row, and 0 for the others [R, E]."""
    ends_E = counts_E.cumsum(0)
    rows_R1 = torch.arange(len(rows_RD), device=ends_E.device).unsqueeze(1)
    return ((rows_R1 < ends_E) & (rows_R1 >= ends_E - counts_E)).to(rows_RD.dtype)


def _biased(
    rows_RO: Tensor, places_RE: Tensor | None, bias_EO: Tensor | None, *, share: float = 1.0
) -> Tensor:
    """Return each row plus a share of its expert's bias.

    It is a product with the places, so that gradients are summed as those of matrices, and 0 without rows.
    """
    if places_RE is None or bias_EO is None:
        return rows_RO
    return torch.addmm(rows_RO, places_RE, bias_EO.to(rows_RO.dtype), alpha=share)


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        # The same memory, but no view for autograd: `fully_shard` warns of modules that return one.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def grouped_product(rows_RI: Tensor, weight_EIO: Tensor, counts_E: Tensor) -> Tensor:
    """Return the product of each row with its expert's matrix, in one operator.

    It requires widths of a multiple of 16 bytes. No row is behind the last expert's, where the operator would
    return memory as it is.

    Args:
        rows_RI: rows sorted by expert.
        weight_EIO: the experts' matrices.
        counts_E: number of rows of each expert; their sum is R.
    """
    ends_E = counts_E.cumsum(0).to(torch.int32)
    product: Tensor = functional.grouped_mm(rows_RI, weight_EIO, offs=ends_E)
    # The operator's backward pass refuses gradients that are not contiguous.
    found: Tensor = _ContiguousGradient.apply(product)
    return found


def _looped_product(rows_RI: Tensor, weight_EIO: Tensor, counts_E: Tensor) -> Tensor:
    """Return the same as `grouped_product`, one expert after the other; the host waits for the counts."""
    parts = zip(rows_RI.split(counts_E.tolist()), weight_EIO.unbind(), strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


# The loop depends on values of tensors, and torch.compile knows the grouped product of bfloat16 alone.
looped_product = CompileDisabled(_looped_product)
uncompiled_grouped_product = CompileDisabled(grouped_product)
COMPILE_DISABLED = (looped_product, uncompiled_grouped_product)

"""The blocks of experts, whose matrices of one kind are one tensor [experts, inputs, outputs]."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import InitMethod, logical_parameter

__all__ = ["ExpertBlocks", "ExpertProduct", "grouped_product", "looped_product"]

# (rows [R, I] sorted by expert, weights [E, I, O], rows of each expert [E]) -> [R, O]
ExpertProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


class ExpertBlocks(nn.Module):
    """Computes down(activation(up(x))) of each row with its expert's matrices; gated ones as GatedMLP.

    Args:
        number: number of experts.
        hidden_size: width of input and output.
        width: width between the projections of an expert.
        activation: elementwise activation, of the gate if there is one.
        is_gated: experts have a second input projection, the gate.
        product: computes products with the matrices of all experts.
        init: fills `up` and `gate`.
        output_init: fills `down`.
        group: the ranks over which each expert's width is split.
        experts: the ranks that divide the experts.
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
        product: ExpertProduct | None = None,
        group: Group = SINGLE_RANK,
        experts: Group = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.product = looped_product if product is None else product
        wide, narrow = (number, hidden_size, width), (number, width, hidden_size)
        parameter = partial(logical_parameter, group=group, experts=experts)
        self.up = parameter(wide, init=init, split_dim=2)
        self.gate = parameter(wide, init=init, split_dim=2) if is_gated else None
        self.down = parameter(narrow, init=output_init, split_dim=1)

    def forward(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Return the output of each row's expert; this rank's part of the sum over its width.

        Args:
            rows_RD: rows sorted by expert.
            counts_E: number of rows of each of this rank's experts; their sum is R.
        """
        up_RF = self.product(rows_RD, self.up, counts_E)
        if self.gate is None:
            return self.product(self.activation(up_RF), self.down, counts_E)
        gated_RF = up_RF * self.activation(self.product(rows_RD, self.gate, counts_E))
        return self.product(gated_RF, self.down, counts_E)


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

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


def looped_product(rows_RI: Tensor, weight_EIO: Tensor, counts_E: Tensor) -> Tensor:
    """Return the same as `grouped_product`, one expert after the other; the host waits for the counts."""
    parts = zip(rows_RI.split(counts_E.tolist()), weight_EIO.unbind(), strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])

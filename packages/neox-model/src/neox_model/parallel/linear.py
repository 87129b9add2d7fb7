"""Linear layers whose weight is split over tensor-parallel ranks, by columns (outputs) or by rows (inputs).

A column-parallel layer followed by a row-parallel one requires one collective forward and one backward
(arXiv:1909.08053, section 3). With `skip_bias` the bias is returned instead of added, so that it can be
fused with the next operation.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import InitMethod, RowBlocks, logical_parameter
from neox_model.parallel.low_rank import Adapter, LowRank
from neox_model.parallel.sequence import TPInput, from_row_parallel, gather_input

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "one_init", "zero_init"]

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def zero_init(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill a tensor with zeros, the initialization of biases."""
    tensor.zero_()


def one_init(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill a tensor with ones, the initialization of scales."""
    tensor.fill_(1.0)


class _SplitLinear(nn.Module):
    """A split matrix; its bias is split with the outputs, or whole on every rank.

    Args:
        in_features: width of the whole input.
        out_features: width of the whole output.
        init: fills the whole weight.
        group: the tensor-parallel ranks.
        bias: use a bias.
        skip_bias: return the bias instead of adding it.
        adapter: form of a low-rank adapter; None: no adapter.
        blocks: the order of the outputs of several matrices in one; None for one matrix.
    """

    split_dim: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init: InitMethod,
        group: Group = SINGLE_RANK,
        bias: bool = True,
        skip_bias: bool = False,
        adapter: LowRank | None = None,
        blocks: RowBlocks | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.skip_bias = skip_bias
        self.weight = logical_parameter(
            (out_features, in_features), init=init, group=group, split_dim=self.split_dim, blocks=blocks
        )
        if bias:
            kind = getattr(init, "kind", None)
            self.bias = logical_parameter(
                (out_features,),
                init=zero_init,
                group=group,
                split_dim=0 if self.split_dim == 0 else None,
                kind=None if kind is None else f"{kind}_bias",
            )
        else:
            self.register_parameter("bias", None)
        self.adapter: Adapter | None = None
        if adapter is not None:
            self.adapter = Adapter(
                in_features, out_features, adapter, group, splits_inputs=self.split_dim == 1
            )

    def operands(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the inputs, the weights and the bias with which the matrix computes."""
        return inputs, self.weight, self.bias


class ColumnParallelLinear(_SplitLinear):
    """Computes x @ weight.T + bias, with each rank computing its part of the outputs.

    The input is the same on every rank, or each rank's part of the sequence if the group splits it.
    """

    split_dim = 0

    def forward(self, inputs: Tensor, tp_input: TPInput | None = None) -> tuple[Tensor, Tensor | None]:
        """Return this rank's outputs, and the bias if `skip_bias`, else None.

        Args:
            inputs: the input, or `tp_input.whole`.
            tp_input: the input, which has entered the split for several matrices.
        """
        if tp_input is None:
            tp_input = gather_input(inputs, self.group)
            inputs = tp_input.whole
        inputs, weight, bias = self.operands(inputs)
        outputs = tp_input.product(inputs, weight, None if self.skip_bias else bias)
        if self.adapter is not None:
            outputs = outputs + self.adapter(tp_input.rows)
        return outputs, bias if self.skip_bias else None


class RowParallelLinear(_SplitLinear):
    """Computes x @ weight.T + bias, with each rank holding its part of the inputs.

    The result is whole on every rank. If the group splits the sequence, each rank receives its part of it.
    Every rank holds the bias, which is added once, after the sum.
    """

    split_dim = 1

    def forward(
        self, inputs: Tensor, *, reduces: bool = True, product: Product = functional.linear
    ) -> tuple[Tensor, Tensor | None]:
        """Return the whole output, and the bias if `skip_bias`, else None.

        Args:
            inputs: this rank's part of the input.
            reduces: False: return this rank's partial result, and the bias, for the sum over ranks. The form
                of an adapter has the same (`is_summed_later`).
            product: function of (inputs, weight, bias or None) that computes the product. With another than
                torch's the matrix has no adapter, and its operands are its own.
        """
        inputs, weight, bias = self.operands(inputs)
        if not reduces:
            outputs = product(inputs, weight, None)
            return outputs if self.adapter is None else outputs + self.adapter(inputs), bias
        added = None if self.skip_bias else bias
        if self.group.size == 1:
            outputs = product(inputs, weight, added)
        else:
            outputs = from_row_parallel(product(inputs, weight, None), self.group)
            outputs = outputs if added is None else outputs + added
        if self.adapter is not None:
            outputs = outputs + self.adapter(inputs)
        return outputs, bias if self.skip_bias else None

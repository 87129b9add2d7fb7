"""The transformer layer: attention and MLP, each with a norm and added to the residual stream."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from neox_model.layers.residual_layer import ResidualLayer
from neox_model.parallel.collectives import copy_to_group
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.low_rank import adapter_parameters
from neox_model.parallel.partial_gradients import has_partial_gradient, mark_partial
from neox_model.parallel.sequence import TPInput, from_row_parallel, gather_inputs

__all__ = ["TransformerLayer"]


class TransformerLayer(ResidualLayer):
    """Computes x + attention(norm1(x)), then x + mlp(norm2(x)).

    With norms after the branches, it computes x + norm1_after(attention(x)), then x + norm2_after(mlp(x)).

    With a parallel residual, tensor-parallel ranks communicate once per pass: they sum the outputs of both
    branches together, and the gradients of x after those of both norms, whose weights receive a part of their
    gradients on every rank. Dropout of the branches requires that each output is summed before it. Low-rank
    adapters sum for themselves, so that layers with adapters communicate for each branch.

    Args:
        attention: factory of the attention, which is called with (hidden_SBD, document_ids_BS or None,
            position_ids_SB or None, tp_input or None).
        mlp: factory of the MLP, which is called with (hidden_SBD, tp_input or None); both return (output,
            bias to add or None).
        norm: factory of a norm.
        parallel_residual: compute x + attention(norm1(x)) + mlp(norm2(x)); no norms are after the branches.
        shares_norm: with a parallel residual, compute x + attention(norm1(x)) + mlp(norm1(x)), as GPT-J.
        adds_in_norm: norm2, the norm before the MLP, adds the attention's output to the residual, in one
            operator. There must be no dropout, and the attention must add its bias.
        group: the tensor-parallel ranks.
        options: other arguments of ResidualLayer.
    """

    def __init__(
        self,
        *,
        attention: Callable[[], nn.Module],
        mlp: Callable[[], nn.Module],
        norm: Callable[[], nn.Module],
        parallel_residual: bool = False,
        shares_norm: bool = False,
        adds_in_norm: bool = False,
        group: Group = SINGLE_RANK,
        **options: Any,
    ) -> None:
        super().__init__(norm=norm, **options)
        self.attention = attention()
        self.norm2 = None if self.norm1 is None or shares_norm else norm()
        self.norm2_after = None if self.norm1_after is None else norm()
        self.mlp = mlp()
        self.parallel_residual = parallel_residual
        self.shares_norm = shares_norm
        self.adds_in_norm = adds_in_norm
        self.group = group
        has_adapters = next(adapter_parameters(self), None) is not None
        self.enters_once = parallel_residual and group.size > 1 and not has_adapters
        if self.enters_once:
            norms = [norm for norm in (self.norm1, self.norm2) if norm is not None]
            for parameter in (parameter for norm in norms for parameter in norm.parameters()):
                if not has_partial_gradient(parameter):
                    mark_partial(parameter, group)

    def block(
        self, hidden_SBD: Tensor, document_ids_BS: Tensor | None, position_ids_SB: Tensor | None = None
    ) -> Tensor:
        """Add both branches; `position_ids_SB` gives the positions of tokens that are not consecutive."""
        if self.enters_once:
            return self._enter_once(hidden_SBD, document_ids_BS, position_ids_SB)
        hidden_SBD, normed_SBD = self._enter(self.norm1, hidden_SBD)
        attended = self._leave(self.norm1_after, self.attention(normed_SBD, document_ids_BS, position_ids_SB))
        if self.parallel_residual:
            if not self.shares_norm:
                hidden_SBD, normed_SBD = self._enter(self.norm2, hidden_SBD)
            return self._add(self._add(hidden_SBD, attended), self.mlp(normed_SBD))
        if self.adds_in_norm and self.norm2 is not None:
            middle_SBD, normed_SBD = self.norm2(attended[0], hidden_SBD)
        else:
            middle_SBD = self._add(normed_SBD if self.residual_after_norm else hidden_SBD, attended)
            middle_SBD, normed_SBD = self._enter(self.norm2, middle_SBD)
        residual_SBD = normed_SBD if self.residual_after_norm else middle_SBD
        return self._add(residual_SBD, self._leave(self.norm2_after, self.mlp(normed_SBD)))

    def _enter_once(
        self, hidden_SBD: Tensor, document_ids_BS: Tensor | None, position_ids_SB: Tensor | None
    ) -> Tensor:
        """Add both branches of a parallel residual, with one message per pass if there is no dropout."""
        reduces = self.training and self.dropout > 0.0
        hidden_SBD, (first, second) = self._normed(hidden_SBD, reduces=reduces)
        attended = self.attention(first.whole, document_ids_BS, position_ids_SB, first)
        fed = self.mlp(second.whole, second)
        if reduces:
            return self._add(self._add(hidden_SBD, attended), fed)
        sum_SBD = from_row_parallel(attended[0] + fed[0], self.group)
        return self._add(hidden_SBD, (sum_SBD, _sum_of_given(attended[1], fed[1])))

    def _normed(self, hidden_SBD: Tensor, *, reduces: bool) -> tuple[Tensor, list[TPInput]]:
        """Return the hidden states, and what the norm of each branch computes of them, inside the split."""
        splits = self.group.splits_sequence
        entered_SBD = hidden_SBD if splits else copy_to_group(hidden_SBD, self.group)
        entered_SBD, first = self._enter(self.norm1, entered_SBD)
        normed = [first]
        if not self.shares_norm:
            entered_SBD, second = self._enter(self.norm2, entered_SBD)
            normed.append(second)
        if splits:
            inputs = gather_inputs(normed, self.group, reduces=reduces)
        else:
            inputs = [TPInput(whole, whole, reduces=reduces) for whole in normed]
        return entered_SBD if splits else hidden_SBD, [inputs[0], inputs[-1]]


def _sum_of_given(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the sum of two biases, of which a matrix may have none."""
    if first is None or second is None:
        return second if first is None else first
    return first + second

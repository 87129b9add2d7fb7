"""Mixture of experts: a router sends each token to a few feed-forward blocks, and adds their outputs.

Rows of tokens are sorted by expert, so that each expert's product is over consecutive rows, and no token is
dropped. Tensor-parallel ranks split the width of every expert. Each of them routes the whole sequence, and
computes a part of the gradient of the router, because it has a part of the experts' outputs.

Sources: arXiv:1701.06538; arXiv:2211.15841 (without dropped tokens).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_model.layers.experts.blocks import ExpertBlocks
from neox_model.layers.experts.dispatch import LOCAL_DISPATCH, Dispatcher
from neox_model.layers.experts.router import Router
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import InitMethod, logical_parameter
from neox_model.parallel.sequence import TPInput, from_row_parallel, gather_input

__all__ = ["Experts"]


class _ByExpert(torch.autograd.Function):
    """Repeats the row of each token for its experts, sorted by expert; the backward pass sums them."""

    @staticmethod
    def forward(ctx: Any, tokens_TD: Tensor, order_R: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(places_TK)
        return tokens_TD.index_select(0, order_R // places_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor) -> tuple[Tensor, None, None]:
        (places_TK,) = ctx.saved_tensors
        return functional.embedding_bag(places_TK, of_rows, mode="sum"), None, None


class _ByToken(torch.autograd.Function):
    """Sums the weighted rows of each token; the backward pass reads gradients instead of adding to rows."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_TK: Tensor, order_R: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RD, weights_TK, order_R, places_TK)
        return functional.embedding_bag(places_TK, rows_RD, per_sample_weights=weights_TK, mode="sum")

    @staticmethod
    def backward(ctx: Any, of_tokens: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_RD, weights_TK, order_R, places_TK = ctx.saved_tensors
        of_tokens_RD = of_tokens.index_select(0, order_R // places_TK.shape[1])
        of_weights_R = (rows_RD * of_tokens_RD).sum(dim=-1)
        of_rows = of_tokens_RD * weights_TK.flatten()[order_R].unsqueeze(-1)
        return of_rows, of_weights_R[places_TK], None, None


class Experts(nn.Module):
    """Computes the sum over a token's experts of weight * expert(x), and adds a shared expert's output.

    Args:
        hidden_size: width of input and output.
        router: factory of the router.
        blocks: factory of the experts, given their number.
        init: fills the projection for the shared expert's gate.
        shared: factory of an MLP for all tokens, whose output is added; None: there is none.
        has_shared_gate: multiply that output by the sigmoid of a projection of the input.
        group: the ranks over which each expert's width is split.
        dispatch: sends rows to the ranks with their experts.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        router: Callable[[], Router],
        blocks: Callable[[int], ExpertBlocks],
        init: InitMethod,
        shared: Callable[[], nn.Module] | None = None,
        has_shared_gate: bool = False,
        group: Group = SINGLE_RANK,
        dispatch: Dispatcher = LOCAL_DISPATCH,
    ) -> None:
        super().__init__()
        self.group = group
        self.dispatch = dispatch
        self.router = router()
        self.experts = blocks(self.router.number)
        self.shared = None if shared is None else shared()
        gate = partial(logical_parameter, (1, hidden_size), init=init, group=group, is_partial=True)
        self.shared_gate = gate() if has_shared_gate else None

    def matrices(self) -> Iterator[nn.Parameter]:
        """Yield the weights that are matrices, the router's too, and those of all experts in one.

        The shared expert has its own.
        """
        blocks = self.experts
        found = (self.router.weight, blocks.up, blocks.gate, blocks.down, self.shared_gate)
        return (weight for weight in found if weight is not None)

    def forward(self, hidden_SBD: Tensor, tp_input: TPInput | None = None) -> tuple[Tensor, None]:
        """Return the output; `tp_input` as in ParallelAttention. There is no bias to add."""
        if tp_input is None:
            tp_input = gather_input(hidden_SBD, self.group)
            hidden_SBD = tp_input.whole
        weights_TK, experts_TK, counts_E = self.router(hidden_SBD)
        order_R = experts_TK.flatten().argsort(stable=True)
        places_R = torch.empty_like(order_R)
        places_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        places_TK = places_R.view_as(experts_TK)
        sorted_RD = _ByExpert.apply(hidden_SBD.flatten(0, 1), order_R, places_TK)
        rows_RD = self.dispatch(sorted_RD, counts_E, self.experts)
        sum_TD = _ByToken.apply(rows_RD, weights_TK.to(rows_RD.dtype), order_R, places_TK)
        output_SBD = sum_TD.unflatten(0, hidden_SBD.shape[:2])
        if self.shared is not None:
            output_SBD = output_SBD + self._shared(self.shared, hidden_SBD, tp_input)
        return from_row_parallel(output_SBD, self.group) if tp_input.reduces else output_SBD, None

    def _shared(self, shared: nn.Module, hidden_SBD: Tensor, tp_input: TPInput) -> Tensor:
        reduces, tp_input.reduces = tp_input.reduces, False
        output_SBD: Tensor = shared(hidden_SBD, tp_input)[0]
        tp_input.reduces = reduces
        if self.shared_gate is None:
            return output_SBD
        gate = functional.linear(hidden_SBD, self.shared_gate.to(hidden_SBD.dtype))
        return output_SBD * torch.sigmoid(gate).to(output_SBD.dtype)

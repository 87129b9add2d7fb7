"""The exchange of tokens between ranks that divide the experts (expert parallelism)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from neox_model.parallel.collectives import all_to_all, exchange_rows
from neox_model.parallel.compile_disabled import CompileDisabled
from neox_model.parallel.groups import SINGLE_RANK, Group

__all__ = ["COMPILE_DISABLED", "LOCAL_DISPATCH", "Dispatcher"]


class Dispatcher:
    """Lets each row be computed by the rank with its expert.

    Experts are divided into equal runs, in the order of the ranks. A group of one does not communicate.

    Args:
        group: the ranks that divide the experts; each calls it as many times.

    Attributes:
        is_alone: do not communicate: what other ranks would send is what they are sent. For trials that may
            fail on one rank.
    """

    def __init__(self, group: Group = SINGLE_RANK) -> None:
        self.group = group
        self.is_alone = False

    def __call__(
        self, rows_RD: Tensor, counts_E: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return the results of rows, in their order. Collective over the group.

        The host waits once for the numbers of rows that are sent and received.

        Args:
            rows_RD: rows sorted by expert.
            counts_E: number of rows of each expert; their sum is R.
            compute: returns the results of rows for this rank's experts, given those and their counts.
        """
        if self.group.size == 1:
            return compute(rows_RD, counts_E)
        results: Tensor = _exchanged(self, rows_RD, counts_E, compute)
        return results

    def exchange(
        self, rows_RD: Tensor, counts_E: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return the results of rows, which other ranks compute, too."""
        # Numbers of rows by rank (P) and by expert of a rank (L).
        sent_PL = counts_E.view(self.group.size, -1)
        received_PL = sent_PL if self.is_alone else all_to_all(sent_PL, self.group)
        sent_P, received_P = torch.stack([sent_PL.sum(dim=1), received_PL.sum(dim=1)]).tolist()
        arrived_RD = self._exchange(rows_RD, sent_P, received_P)
        order_R = _order_by_expert(received_PL, sum(received_P))
        places_R = order_R.argsort()
        results_RD = compute(_Permuted.apply(arrived_RD, order_R, places_R), received_PL.sum(dim=0))
        return self._exchange(_Permuted.apply(results_RD, places_R, order_R), received_P, sent_P)

    def _exchange(self, rows_RD: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return rows_RD if self.is_alone else exchange_rows(rows_RD, self.group, sent, received)


# The numbers of rows differ in every step, so that this cannot be compiled.
_exchanged = CompileDisabled(Dispatcher.exchange)
COMPILE_DISABLED = (_exchanged,)

# The dispatcher of one rank, which has all experts.
LOCAL_DISPATCH = Dispatcher()


def _order_by_expert(counts_PL: Tensor, rows: int) -> Tensor:
    """Return the places of rows from several ranks, each rank's sorted by expert, in the order of experts."""
    ranks, experts = counts_PL.shape
    numbers_PL = torch.arange(experts, device=counts_PL.device).expand(ranks, experts)
    expert_R = numbers_PL.flatten().repeat_interleave(counts_PL.flatten(), output_size=rows)
    return expert_R.argsort(stable=True)


class _Permuted(torch.autograd.Function):
    """Returns rows in another order; the backward pass uses the inverse of it instead of adding rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None

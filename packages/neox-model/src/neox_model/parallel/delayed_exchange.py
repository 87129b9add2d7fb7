"""Exchange a number between all ranks while the next iteration runs, so that no rank waits for it."""

from typing import Literal

import torch
from torch import distributed

from neox_model.parallel.groups import Group

__all__ = ["DelayedExchange"]

_OPERATIONS = {"min": distributed.ReduceOp.MIN, "max": distributed.ReduceOp.MAX}


class DelayedExchange:
    """Reduces an integer of each rank to one, which is read later; every rank reads the same.

    All ranks must call the methods in the same order.

    Args:
        control: CPU group of all ranks.
        operation: result of the numbers that the ranks send.
    """

    def __init__(self, control: Group, operation: Literal["min", "max"]) -> None:
        self._control, self._operation = control, _OPERATIONS[operation]
        self._sent: tuple[torch.Tensor, distributed.Work | None] | None = None

    def send(self, number: int) -> None:
        """Start to exchange a number. Collective over the control group; the one before has been received."""
        value, work = torch.tensor([number]), None
        if self._control.size > 1:
            work = distributed.all_reduce(
                value, op=self._operation, group=self._control.process_group, async_op=True
            )
        self._sent = value, work

    def receive(self) -> int | None:
        """Return the result of the numbers that were sent last, once; None if none were."""
        if self._sent is None:
            return None
        (value, work), self._sent = self._sent, None
        if work is not None:
            work.wait()
        return int(value)

"""Average gradients over data-parallel ranks, with many tensors per message."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol, TypeVar

import torch
from torch import Tensor, distributed
from torch.nn import Parameter

from neox_config.facts.collectives import BUCKET_ELEMENTS, EARLY_BUCKET_ELEMENTS, EARLY_ELEMENTS
from neox_model.parallel.groups import Group
from neox_model.torch_compat import foreach_copy_

__all__ = ["EarlyReduction", "GradientReduction", "buckets", "in_buckets"]

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


class _Work(Protocol):
    """A collective operation that was started."""

    def wait(self) -> object:
        """Wait until its result can be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReduction:
    """Replaces gradients by their mean over the data group, in place.

    Args:
        group: the data-parallel ranks.
        dtype: dtype of the messages; None: the gradients' dtype.
        divides_first: divide before the sum instead of after it.
        predivide_factor: divide by this factor before the sum, and by the remaining factor after it.
        divisor: divide the sum by this number; None: by that of the ranks. A gradient of experts is already a
            sum over the ranks that divide them.
    """

    group: Group
    dtype: torch.dtype | None = None
    divides_first: bool = False
    predivide_factor: float = 1.0
    divisor: int | None = None

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Average these gradients. Collective: every rank passes the same shapes in the same order."""
        if self.group.size > 1:
            in_buckets(gradients, lambda flat: self.finish(*self.start(flat)))
        elif self._divisor > 1:
            for gradient in gradients:
                gradient.div_(self._divisor)

    def start(self, flat: Tensor) -> tuple[Tensor, _Work]:
        """Start the sum of a flat tensor, which may be changed; return it for `finish`."""
        sent = flat if self.dtype is None else flat.to(self.dtype)
        if self._before != 1.0:
            sent.div_(self._before)
        work = distributed.all_reduce(sent, group=self.group.process_group, async_op=True)
        assert work is not None, "this rank is not in the group"
        return sent, work

    def finish(self, sent: Tensor, work: _Work) -> Tensor:
        """Return the mean whose sum was started."""
        work.wait()
        after = self._divisor / self._before
        if after != 1.0:
            sent.div_(after)
        return sent

    @property
    def _divisor(self) -> int:
        return self.divisor or self.group.size

    @property
    def _before(self) -> float:
        return float(self._divisor) if self.divides_first else self.predivide_factor


class EarlyReduction:
    """Averages gradients while the backward pass computes others; what is left, when it is called.

    The messages have a fixed order, from the last parameters to the first, which all ranks share.

    Args:
        reduction: averages the gradients.
        parameters: those whose gradients are final when autograd has accumulated them, in the model's order.
        holders: where each of these gradients is accumulated by then: the parameter, or its master weight.
    """

    def __init__(
        self, reduction: GradientReduction, parameters: Sequence[Parameter], holders: Sequence[Parameter]
    ) -> None:
        self._reduction = reduction
        self._buckets = list(buckets(holders[::-1], EARLY_BUCKET_ELEMENTS))
        # Gradients of each bucket that are still to come; empty unless this is the last micro-batch.
        self._missing: list[int] = []
        self._sent = 0
        # Gradients with the message in which their sum is under way.
        self._under_way: deque[tuple[list[Tensor], Tensor, _Work]] = deque()
        bucket_of = {id(each): number for number, bucket in enumerate(self._buckets) for each in bucket}
        for parameter, holder in zip(parameters, holders, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket_of[id(holder)]))

    def begin(self) -> None:
        """Send gradients as they arrive in the next backward pass, the last one of an update."""
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sent = 0

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Average what was not sent yet, and wait for the rest. Collective (see `GradientReduction`)."""
        early = {id(holder.grad) for bucket in self._buckets[: self._sent] for holder in bucket}
        self._missing, self._sent = [], 0
        while self._under_way:
            self._receive()
        self._reduction([each for each in gradients if id(each) not in early])

    @torch.no_grad()
    def _arrived(self, number: int, _: Tensor) -> None:
        if not self._missing:
            return
        self._missing[number] -= 1
        assert self._missing[number] >= 0, "a gradient was changed after it was sent"
        while self._sent < len(self._buckets) and self._missing[self._sent] == 0:
            self._send(self._buckets[self._sent])
            self._sent += 1

    def _send(self, bucket: Sequence[Parameter]) -> None:
        gradients: list[Tensor] = [holder.grad for holder in bucket]  # type: ignore[misc]
        flat = _joined(gradients)
        room = EARLY_ELEMENTS - flat.numel()
        while self._under_way and sum(sent.numel() for _, sent, _ in self._under_way) > room:
            self._receive()
        self._under_way.append((gradients, *self._reduction.start(flat)))

    def _receive(self) -> None:
        gradients, sent, work = self._under_way.popleft()
        _distribute(self._reduction.finish(sent, work), gradients)


def in_buckets(tensors: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> None:
    """Replace tensors by the result of an elementwise function, which receives many as one flat tensor.

    Args:
        tensors: of any shapes; consecutive ones of one dtype are passed together.
        function: returns a tensor of the same length; may change its argument.
    """
    for bucket in buckets(tensors, BUCKET_ELEMENTS):
        # Nothing here refers to a flat tensor, so that it is freed before the next one is made.
        _distribute(function(_joined(bucket)), bucket)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors as a flat one: a copy, or a view of a tensor that is alone."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1)
    return torch.cat([each.reshape(-1) for each in tensors])


def _distribute(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copy the elements of a flat tensor to these tensors, unless it is a view of one."""
    if flat.data_ptr() != tensors[0].data_ptr():
        pieces = flat.split([each.numel() for each in tensors])
        foreach_copy_(tensors, [piece.view_as(each) for piece, each in zip(pieces, tensors, strict=True)])


def buckets(tensors: Sequence[AnyTensor], limit: int) -> Iterator[list[AnyTensor]]:
    """Yield runs of tensors of one dtype with at most this number of elements, or one larger tensor."""
    for _, run in groupby(tensors, key=lambda tensor: tensor.dtype):
        bucket: list[AnyTensor] = []
        elements = 0
        for tensor in run:
            if bucket and elements + tensor.numel() > limit:
                yield bucket
                bucket, elements = [], 0
            bucket.append(tensor)
            elements += tensor.numel()
        yield bucket

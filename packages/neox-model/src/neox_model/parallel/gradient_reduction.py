"""Average gradients over data-parallel ranks, with many tensors per message."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, distributed

from neox_config.facts.collectives import BUCKET_ELEMENTS
from neox_model.parallel.groups import Group
from neox_model.torch_compat import foreach_copy_

__all__ = ["GradientReduction", "in_buckets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReduction:
    """Replaces gradients by their mean over the data group, in place.

    Args:
        group: the data-parallel ranks.
        dtype: dtype of the messages; None: the gradients' dtype.
        divides_first: divide by the number of ranks before the sum instead of after it.
        predivide_factor: divide by this factor before the sum, and by the remaining factor after it.
    """

    group: Group
    dtype: torch.dtype | None = None
    divides_first: bool = False
    predivide_factor: float = 1.0

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Average these gradients. Collective: every rank passes the same shapes in the same order."""
        if self.group.size == 1:
            return
        in_buckets(gradients, self._mean)

    def _mean(self, flat: Tensor) -> Tensor:
        sent = flat if self.dtype is None else flat.to(self.dtype)
        before = float(self.group.size) if self.divides_first else self.predivide_factor
        after = self.group.size / before
        if before != 1.0:
            sent.div_(before)
        distributed.all_reduce(sent, group=self.group.process_group)
        if after != 1.0:
            sent.div_(after)
        return sent


def in_buckets(tensors: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> None:
    """Replace tensors by the result of an elementwise function, which receives many as one flat tensor.

    Args:
        tensors: of any shapes; consecutive ones of one dtype are passed together.
        function: returns a tensor of the same length; may change its argument.
    """
    for bucket in _buckets(tensors):
        _replace(bucket, function)


def _replace(bucket: list[Tensor], function: Callable[[Tensor], Tensor]) -> None:
    # A function of its own, so that a flat tensor is freed before the next one is made.
    is_alone = len(bucket) == 1 and bucket[0].is_contiguous()
    flat = bucket[0].view(-1) if is_alone else torch.cat([part.reshape(-1) for part in bucket])
    result = function(flat)
    if result.data_ptr() != bucket[0].data_ptr():
        pieces = result.split([part.numel() for part in bucket])
        foreach_copy_(bucket, [piece.view_as(part) for piece, part in zip(pieces, bucket, strict=True)])


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield runs of tensors of one dtype with at most `BUCKET_ELEMENTS` elements, or one larger tensor."""
    for _, run in groupby(gradients, key=lambda gradient: gradient.dtype):
        bucket: list[Tensor] = []
        elements = 0
        for gradient in run:
            if bucket and elements + gradient.numel() > BUCKET_ELEMENTS:
                yield bucket
                bucket, elements = [], 0
            bucket.append(gradient)
            elements += gradient.numel()
        yield bucket

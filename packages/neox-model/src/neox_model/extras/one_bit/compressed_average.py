"""Average tensors over data-parallel ranks with one bit per element, and error feedback.

Every rank is the server of one part of each tensor. A rank sends each server the signs of its values, and one
scale per tensor: the mean absolute value, which is the magnitude of the values over that of their signs. The
server averages what it received, compresses the mean in the same way, and sends it to all ranks. What a
compression loses is added to the next values: the worker error on the sender, the server error on the server.

The result for a tensor depends neither on the other tensors nor on their order, so that copies of a weight on
pipeline stages or tensor-parallel ranks stay equal. All ranks decode the same bytes.

Source: arXiv:2102.02888, algorithm 1 and figure 3 (compressed all-reduce); the scale as in arXiv:2202.06009.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import all_to_all_single
from torch.nn.functional import pad

from neox_model.parallel.gradient_reduction import buckets
from neox_model.parallel.groups import Group, part_length
from neox_model.torch_compat import all_gather_single, foreach_copy_

__all__ = ["CompressedAverage", "Compressible"]

_BITS = 8
# At its peak a compression holds at most three float32 numbers and three bytes for each of these elements:
# the values of the tensors, padded and in rows; signs, live elements, and bits to pack.
# `neox_config/estimate/memory.py` counts them.
_BUCKET_ELEMENTS = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressible:
    """A tensor to average, float32; all four have the same meaning on every rank.

    Args:
        values: replaced by the mean.
        is_live: of the same shape; elements that are False are zero on every rank, and stay so. One bit
            cannot represent a zero.
        worker_error: of the same shape; what earlier compressions of this rank lost.
        server_error: 1-D, `part_length` elements; what earlier compressions of this rank's part lost.
    """

    values: Tensor
    is_live: Tensor
    worker_error: Tensor
    server_error: Tensor


class CompressedAverage:
    """Replaces tensors by an approximate mean over the data group, the same on every rank.

    Args:
        group: the data-parallel ranks.

    Attributes:
        group: the same.
        sent_bytes: bytes that this rank has sent to others so far.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.sent_bytes = 0

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Compressible]) -> None:
        """Average the tensors, and update their errors. Collective: the same shapes in the same order."""
        if self.group.size == 1:
            return
        start = 0
        for bucket in buckets([each.values for each in tensors], _BUCKET_ELEMENTS):
            self._average(tensors[start : start + len(bucket)])
            start += len(bucket)

    def _average(self, bucket: Sequence[Compressible]) -> None:
        lengths = [part_length(each.values.numel(), self.group.size) for each in bucket]
        mine = slice(self.group.rank, self.group.rank + 1)
        is_live = self._rows([each.is_live for each in bucket], lengths)
        values = self._rows([each.values + each.worker_error for each in bucket], lengths)
        sent = _compress(values, is_live, lengths)
        self._write(
            [each.worker_error for each in bucket], values.sub_(sent.decoded(is_live, lengths)), lengths
        )

        parts = _unpack(self._exchange(sent.packed()), lengths).decoded(is_live[mine], lengths)
        mean = _mean_in_order(parts)
        # Where no element is live, errors are zero like the values.
        mean += torch.cat([each.server_error for each in bucket])
        served = _compress(mean, is_live[mine], lengths)
        lost = (mean - served.decoded(is_live[mine], lengths)).view(-1)
        foreach_copy_([each.server_error for each in bucket], list(lost.split(lengths)))

        whole = _unpack(self._gather(served.packed()), lengths).decoded(is_live, lengths)
        self._write([each.values for each in bucket], whole, lengths)

    def _rows(self, tensors: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        """Return the tensors in rows: a row is one server's part of each tensor, one after another."""
        ranks = self.group.size
        return torch.cat(
            [
                pad(tensor.reshape(-1), (0, ranks * length - tensor.numel())).view(ranks, length)
                for tensor, length in zip(tensors, lengths, strict=True)
            ],
            dim=1,
        )

    def _write(self, tensors: Sequence[Tensor], rows: Tensor, lengths: Sequence[int]) -> None:
        """Copy rows into tensors: the reverse of `_rows`."""
        parts = rows.split(list(lengths), dim=1)
        whole = [
            part.reshape(-1)[: tensor.numel()].view_as(tensor)
            for tensor, part in zip(tensors, parts, strict=True)
        ]
        foreach_copy_(list(tensors), whole)

    def _exchange(self, rows: Tensor) -> Tensor:
        """Send each rank its row; return the rows for this rank, by sender."""
        received = torch.empty_like(rows)
        all_to_all_single(received, rows, group=self.group.process_group)
        self.sent_bytes += (self.group.size - 1) * rows.shape[1]
        return received

    def _gather(self, row: Tensor) -> Tensor:
        """Send this rank's row to all; return all rows, by sender."""
        received = row.new_empty((self.group.size, row.shape[1]))
        all_gather_single(received, row, group=self.group.process_group)
        self.sent_bytes += (self.group.size - 1) * row.shape[1]
        return received


@dataclass(frozen=True, slots=True)
class _Compressed:
    """Rows of signs with one scale per tensor.

    Args:
        is_positive: bool, [rows, elements].
        scales: float32, [rows, tensors].
    """

    is_positive: Tensor
    scales: Tensor

    def decoded(self, is_live: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the values that these stand for, zero where an element is not live."""
        values = self.is_positive.to(torch.float32).mul_(2).sub_(1).mul_(is_live)
        for part, scale in zip(values.split(list(lengths), dim=1), self.scales.unbind(dim=1), strict=True):
            part.mul_(scale[:, None])
        return values

    def packed(self) -> Tensor:
        """Return the bytes to send, uint8, [rows, elements / 8 + 4 * tensors]."""
        bits = self.is_positive.view(len(self.is_positive), -1, _BITS).to(torch.uint8)
        places = torch.arange(_BITS, dtype=torch.uint8, device=bits.device)
        signs = (bits << places).sum(dim=-1, dtype=torch.uint8)
        return torch.cat([signs, self.scales.contiguous().view(torch.uint8)], dim=1)


def _mean_in_order(rows: Tensor) -> Tensor:
    """Return the mean of the rows, added one after another, as one row.

    The order in which `mean` adds depends on the position of an element in its row, and so on the place of
    its tensor in the message.
    """
    total = rows[:1].clone()
    for row in rows[1:]:
        total += row
    return total.div_(len(rows))


def _unpack(rows: Tensor, lengths: Sequence[int]) -> _Compressed:
    """Return what `packed` packed."""
    signs, scales = rows.split([sum(lengths) // _BITS, 4 * len(lengths)], dim=1)
    places = torch.arange(_BITS, dtype=torch.uint8, device=rows.device)
    is_positive = ((signs[:, :, None] >> places) & 1).view(len(rows), -1).to(torch.bool)
    return _Compressed(is_positive, scales.contiguous().view(torch.float32))


def _compress(values: Tensor, is_live: Tensor, lengths: Sequence[int]) -> _Compressed:
    """Compress rows of values, which are zero where they are not live."""
    magnitudes = values.abs().split(list(lengths), dim=1)
    sums = torch.stack([each.sum(dim=1) for each in magnitudes], dim=1)
    counts = torch.stack([each.sum(dim=1) for each in is_live.split(list(lengths), dim=1)], dim=1)
    return _Compressed(values >= 0, sums / counts.clamp(min=1))

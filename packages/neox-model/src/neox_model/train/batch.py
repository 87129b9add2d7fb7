"""One micro-batch, derived from windows of `seq_length` + 1 tokens.

Every rank that needs tokens (all tensor ranks; the first and the last pipeline stage) reads the same
windows itself, so no batch is ever sent between ranks.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Batch", "as_batch", "batches"]


class Batch(NamedTuple):
    """The micro-batch of one data-parallel rank.

    Args:
        tokens_BS: the model's input, int64.
        labels_BS: the token after each input token, int64.
        loss_mask_BS: 1 where the prediction counts, 0 where it does not, float32.
    """

    tokens_BS: Tensor  # noqa: N815
    labels_BS: Tensor  # noqa: N815
    loss_mask_BS: Tensor  # noqa: N815

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device; the copy does not wait where memory is pinned."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))


def as_batch(windows: Tensor, *, masked_out_token: int | None = None) -> Batch:
    """Inputs, labels and loss mask of token windows.

    Args:
        windows: int64 [batch, seq_length + 1].
        masked_out_token: predictions made from this input token do not count; None: all count.
    """
    tokens_BS, labels_BS = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    loss_mask_BS = torch.ones(tokens_BS.shape, dtype=torch.float32)
    if masked_out_token is not None:
        loss_mask_BS[tokens_BS == masked_out_token] = 0.0
    return Batch(tokens_BS, labels_BS, loss_mask_BS)


def batches(windows: Iterable[Tensor], *, masked_out_token: int | None = None) -> Iterator[Batch]:
    """A batch per item of a loader; see `as_batch`."""
    for item in windows:
        yield as_batch(item, masked_out_token=masked_out_token)

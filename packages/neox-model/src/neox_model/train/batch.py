"""One micro-batch, derived from windows of `seq_length` + 1 tokens.

Every rank that needs tokens (all tensor ranks; the first and the last pipeline stage) reads the same
windows itself, so no batch is ever sent between ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from neox_data.documents import document_ids, position_ids
from neox_model.parallel.groups import Group

__all__ = ["Batch", "DocumentEnds", "Weigh", "as_batch", "as_they_are", "weighted_globally"]

# (micro-batches, number of them that make an average, where they are wanted) -> that many, with the weights
# that tokens have in the loss.
Weigh = Callable[[Iterator["Batch"], int, torch.device], Iterator["Batch"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentEnds:
    """What the end of a document within a window changes.

    Args:
        token: the token that ends a document.
        masks_loss: predictions made from it do not count.
        hides_earlier: no token sees one of an earlier document.
        restarts_positions: the next token is at position 0 again.
    """

    token: int
    masks_loss: bool = False
    hides_earlier: bool = False
    restarts_positions: bool = False


class Batch(NamedTuple):
    """The micro-batch of one data-parallel rank.

    Args:
        tokens_BS: the model's input, int64.
        labels_BS: the token after each input token, int64.
        loss_mask_BS: 1 where the prediction counts, 0 where it does not, float32.
        documents_BS: the document of each token, where tokens see nothing of earlier ones.
        positions_BS: the position of each token, where they are not counted from the window's start, and
            beside documents.
    """

    tokens_BS: Tensor  # noqa: N815
    labels_BS: Tensor  # noqa: N815
    loss_mask_BS: Tensor  # noqa: N815
    documents_BS: Tensor | None = None  # noqa: N815
    positions_BS: Tensor | None = None  # noqa: N815

    @property
    def inputs(self) -> Tensor | tuple[Tensor, ...]:
        """What the model takes (see Embedding)."""
        further = [given for given in (self.documents_BS, self.positions_BS) if given is not None]
        return (self.tokens_BS, *further) if further else self.tokens_BS

    @property
    def targets(self) -> tuple[Tensor, Tensor]:
        """What the loss compares with."""
        return self.labels_BS, self.loss_mask_BS

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device; the copy does not wait where memory is pinned."""
        moved = (None if given is None else given.to(device, non_blocking=True) for given in self)
        return Batch(*moved)  # type: ignore[arg-type]


def as_batch(windows: Tensor, *, ends: DocumentEnds | None = None) -> Batch:
    """What a model learns from token windows.

    Args:
        windows: int64 [batch, seq_length + 1], on the CPU.
        ends: what documents' ends change; None: nothing.
    """
    tokens_BS, labels_BS = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    loss_mask_BS = torch.ones(tokens_BS.shape, dtype=torch.float32)
    if ends is None:
        return Batch(tokens_BS, labels_BS, loss_mask_BS)
    if ends.masks_loss:
        loss_mask_BS[tokens_BS == ends.token] = 0.0
    documents_BS = positions_BS = None
    if ends.hides_earlier:
        documents_BS = torch.from_numpy(document_ids(tokens_BS.numpy(), ends.token))
    if ends.hides_earlier or ends.restarts_positions:
        restart = ends.token if ends.restarts_positions else None
        positions_BS = torch.from_numpy(position_ids(tokens_BS.numpy(), restart))
    return Batch(tokens_BS, labels_BS, loss_mask_BS, documents_BS, positions_BS)


def as_they_are(batches: Iterator[Batch], count: int, device: torch.device) -> Iterator[Batch]:
    """The next `count` micro-batches on a device: each is averaged over its own unmasked tokens."""
    return (batch.to(device) for batch in islice(batches, count))


def weighted_globally(
    batches: Iterator[Batch], count: int, device: torch.device, *, data: Group
) -> Iterator[Batch]:
    """The next `count` micro-batches on a device, with masks that divide by all their unmasked tokens.

    The masks become weights whose mean over micro-batches and ranks of the data group is one divided by the
    unmasked tokens of all of them, so that the mean of the summed losses is the mean over those tokens.
    Collective over the data group (nothing is sent where the stream is empty).
    """
    taken = [batch.to(device) for batch in islice(batches, count)]
    if not taken:
        return iter(())
    unmasked = torch.stack([batch.loss_mask_BS.sum() for batch in taken]).sum()
    if data.size > 1:
        distributed.all_reduce(unmasked, group=data.process_group)
    weight = len(taken) * data.size / unmasked.clamp(min=1.0)
    return iter([batch._replace(loss_mask_BS=batch.loss_mask_BS * weight) for batch in taken])

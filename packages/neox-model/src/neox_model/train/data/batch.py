"""A micro-batch, derived from windows of `seq_length` + 1 tokens.

Every rank that needs tokens (all tensor-parallel ranks of the first and the last pipeline stage) reads the
windows itself, so no batches are sent between ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from neox_data.documents import document_ids, position_ids
from neox_model.parallel.groups import Group

__all__ = [
    "Batch",
    "DocumentEnds",
    "TokenWeighting",
    "as_batch",
    "as_masked_batch",
    "as_retrieval_batch",
    "as_tower_inputs",
    "unweighted",
    "weighted_by_micro_batch",
    "weighted_globally",
]

# The document of padding, which no token is part of.
_PADDING = -1

# (micro-batches, number of them per average, device) -> that number of micro-batches, whose masks have the
# weights of tokens in the loss.
TokenWeighting = Callable[[Iterator["Batch"], int, torch.device], Iterator["Batch"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentEnds:
    """The effects of the end of a document within a window.

    Args:
        token: the end-of-document token.
        masks_loss: exclude predictions from this token from the loss.
        hides_others: mask tokens of other documents in attention.
        restarts_positions: restart positions at 0 after this token.
    """

    token: int
    masks_loss: bool = False
    hides_others: bool = False
    restarts_positions: bool = False


class Batch(NamedTuple):
    """The micro-batch of one data-parallel rank.

    Args:
        tokens_BS: the model's input, int64.
        labels_BS: the label of each input token, which is the token after it or, in masked models, the token
            that is masked; 0 where none counts; int64.
        loss_mask_BS: 1 where the prediction counts in the loss, else 0, float32.
        document_ids_BS: document ids, if tokens do not see other documents or padding.
        positions_BS: position ids, if positions do not count from the start of the window, or with document
            ids.
    """

    tokens_BS: Tensor  # noqa: N815
    labels_BS: Tensor  # noqa: N815
    loss_mask_BS: Tensor  # noqa: N815
    document_ids_BS: Tensor | None = None  # noqa: N815
    positions_BS: Tensor | None = None  # noqa: N815

    @property
    def inputs(self) -> Tensor | tuple[Tensor, ...]:
        """Return the model's input (see Embedding)."""
        further = [given for given in (self.document_ids_BS, self.positions_BS) if given is not None]
        return (self.tokens_BS, *further) if further else self.tokens_BS

    @property
    def targets(self) -> tuple[Tensor, Tensor]:
        """Return the targets of the loss."""
        return self.labels_BS, self.loss_mask_BS

    def pinned(self, gpu: int) -> "Batch":
        """Copy the batch to page-locked memory, from which this GPU copies while the program continues."""
        # A thread begins with the first GPU, which may belong to another process.
        with torch.cuda.device(gpu):
            return Batch(*(None if given is None else given.pin_memory() for given in self))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to a device, asynchronously if its memory is pinned."""
        moved = (None if given is None else given.to(device, non_blocking=True) for given in self)
        return Batch(*moved)  # type: ignore[arg-type]


def as_batch(windows: Tensor, *, ends: DocumentEnds | None = None, labels: Tensor | None = None) -> Batch:
    """Convert token windows to a batch.

    Args:
        windows: int64 [batch, seq_length + 1], on the CPU.
        ends: effects of ends of documents; None: no effects.
        labels: one label per token of `windows`, not shifted; the loss leaves out negative ones. None: the
            tokens.
    """
    tokens_BS = windows[:, :-1].contiguous()
    labels_BS = (windows if labels is None else labels)[:, 1:]
    loss_mask_BS = (labels_BS >= 0).float().contiguous()
    # The cross entropy requires a label inside the vocabulary for every token, also where its weight is 0.
    labels_BS = labels_BS.clamp(min=0).contiguous()
    if ends is None:
        return Batch(tokens_BS, labels_BS, loss_mask_BS)
    if ends.masks_loss:
        loss_mask_BS[tokens_BS == ends.token] = 0.0
    document_ids_BS = positions_BS = None
    if ends.hides_others:
        document_ids_BS = torch.from_numpy(document_ids(tokens_BS.numpy(), ends.token))
    if ends.hides_others or ends.restarts_positions:
        positions_BS = _positions(tokens_BS, ends)
    return Batch(tokens_BS, labels_BS, loss_mask_BS, document_ids_BS, positions_BS)


def as_masked_batch(rows: Tensor, *, ends: DocumentEnds, hides_padding: bool) -> Batch:
    """Convert masked samples to a batch.

    End-of-document tokens are never masked, so that they are those of the documents.

    Args:
        rows: int64 [batch, 3, seq_length], on the CPU: inputs, labels (negative ones do not count), and 1 for
            tokens, 0 for padding (see neox_data.masking).
        ends: effects of ends of documents.
        hides_padding: mask padding in attention.
    """
    tokens_BS, labels_BS, is_content_BS = (row.contiguous() for row in rows.unbind(dim=1))
    loss_mask_BS, labels_BS = (labels_BS >= 0).float(), labels_BS.clamp(min=0)
    document_ids_BS = positions_BS = None
    if ends.hides_others:
        document_ids_BS = torch.from_numpy(document_ids(tokens_BS.numpy(), ends.token))
    elif hides_padding:
        document_ids_BS = torch.zeros_like(tokens_BS)
    if document_ids_BS is not None:
        document_ids_BS = document_ids_BS.masked_fill(is_content_BS == 0, _PADDING)
    if document_ids_BS is not None or ends.restarts_positions:
        positions_BS = _positions(tokens_BS, ends)
    return Batch(tokens_BS, labels_BS, loss_mask_BS, document_ids_BS, positions_BS)


def as_retrieval_batch(rows: Tensor) -> Batch:
    """Convert samples of the inverse cloze task to a batch: all queries, and then the block of each of them.

    The first place of each query counts in the loss. Padding is a separate document.

    Args:
        rows: int64 [batch, 2, 2, seq_length], on the CPU: query and block, each with its tokens, and 1 for
            these, 0 for padding (see neox_data.inverse_cloze).
    """
    tokens_BS, document_ids_BS, positions_BS = as_tower_inputs(rows.transpose(0, 1).flatten(0, 1))
    loss_mask_BS = torch.zeros(tokens_BS.shape)
    loss_mask_BS[: len(rows), 0] = 1.0
    return Batch(tokens_BS, torch.zeros_like(tokens_BS), loss_mask_BS, document_ids_BS, positions_BS)


def as_tower_inputs(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert texts to the inputs of a tower: tokens, document ids, positions; int64 [batch, seq_length].

    Args:
        rows: int64 [batch, 2, seq_length], on the CPU: tokens, and 1 for these, 0 for padding.
    """
    tokens_BS, is_content_BS = (row.contiguous() for row in rows.unbind(dim=1))
    document_ids_BS = torch.zeros_like(tokens_BS).masked_fill(is_content_BS == 0, _PADDING)
    return tokens_BS, document_ids_BS, torch.from_numpy(position_ids(tokens_BS.numpy()))


def _positions(tokens_BS: Tensor, ends: DocumentEnds) -> Tensor:
    restart = ends.token if ends.restarts_positions else None
    return torch.from_numpy(position_ids(tokens_BS.numpy(), restart))


def unweighted(batches: Iterator[Batch], count: int, device: torch.device) -> Iterator[Batch]:
    """Yield the next `count` micro-batches on a device; the loss of each is a sum over tokens."""
    return (batch.to(device) for batch in islice(batches, count))


def weighted_by_micro_batch(batches: Iterator[Batch], count: int, device: torch.device) -> Iterator[Batch]:
    """Yield the next `count` micro-batches on a device; the loss of each is its mean over unmasked tokens.

    Without any it is 0.
    """
    for batch in unweighted(batches, count, device):
        weights_BS = batch.loss_mask_BS / batch.loss_mask_BS.sum().clamp(min=1.0)
        yield batch._replace(loss_mask_BS=weights_BS)


def weighted_globally(
    batches: Iterator[Batch], count: int, device: torch.device, *, data: Group
) -> Iterator[Batch]:
    """Yield the next `count` micro-batches on a device, weighted by the unmasked tokens of all of them.

    Masks are divided by the mean number of unmasked tokens over micro-batches and ranks of the data group, so
    that the mean of the summed losses is the mean over all unmasked tokens. Collective over the data group
    (no communication if the stream is empty).
    """
    taken = [batch.to(device) for batch in islice(batches, count)]
    if not taken:
        return iter(())
    unmasked = torch.stack([batch.loss_mask_BS.sum() for batch in taken]).sum()
    if data.size > 1:
        distributed.all_reduce(unmasked, group=data.process_group)
    weight = len(taken) * data.size / unmasked.clamp(min=1.0)
    return iter([batch._replace(loss_mask_BS=batch.loss_mask_BS * weight) for batch in taken])

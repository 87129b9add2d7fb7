"""Store the inputs of recomputed layers until the backward pass: partitioned, in one buffer, or on the host.

torch's checkpoint keeps a segment's inputs as saved tensors, so hooks on saved tensors suffice: an input is
packed when it is saved and unpacked when its segment is recomputed. DeepSpeed's checkpoint functions use a
reentrant checkpoint and GPU streams instead; hooks work on any device.
"""

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from neox_model.errors import ModelError
from neox_model.parallel.collectives import all_gather
from neox_model.parallel.groups import SINGLE_RANK, Group

__all__ = ["InputStorage"]


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Kept:
    """A stored input: this rank's part of its elements, and the shape and device to restore it."""

    share: Tensor
    shape: torch.Size
    device: torch.device


class InputStorage:
    """Packs and unpacks the inputs of recomputed segments.

    Args:
        group: ranks that hold equal inputs and store a part each; unpacking is collective over them.
        in_host: store them in host memory (page-locked if they come from a GPU).
        slots: number of inputs in one preallocated buffer; 0: the number given to `expect`; None: allocate
            memory for each input.
    """

    def __init__(
        self, *, group: Group = SINGLE_RANK, in_host: bool = False, slots: int | None = None
    ) -> None:
        self._group = group
        self._in_host = in_host
        self._slots = slots
        self._memory: Tensor | None = None
        self._free: list[int] = []

    def expect(self, inputs: int) -> None:
        """Set the number of inputs stored at a time, which sizes the buffer unless its size was given."""
        if self._slots == 0:
            self._slots = inputs

    def hooks(self) -> AbstractContextManager[None]:
        """Return a context manager within which saved tensors are stored here."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Kept:
        if not tensor.is_floating_point():
            return tensor
        kept = _Kept(tensor.new_empty(0), tensor.shape, tensor.device)
        # This rank's part of the flat tensor, padded with zeros to equal lengths.
        flat = tensor.detach().reshape(-1)
        length = -(-flat.numel() // self._group.size)
        mine = flat[self._group.rank * length : (self._group.rank + 1) * length]
        if mine.numel() < length:
            mine = torch.cat((mine, mine.new_zeros(length - mine.numel())))
        kept.share = self._place(kept, mine)
        kept.share.copy_(mine, non_blocking=kept.share.is_pinned())
        return kept

    def _unpack(self, kept: Tensor | _Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        share = kept.share.to(kept.device, non_blocking=kept.share.is_pinned())
        # The buffer's slot is reused as soon as this input is released.
        share = share.clone() if share is kept.share else share
        return all_gather(share, self._group, dim=0)[: kept.shape.numel()].view(kept.shape)

    def _place(self, kept: _Kept, share: Tensor) -> Tensor:
        """Return memory for a part, released with `kept`."""
        if self._slots is None:
            return self._allocate(share, share.numel())
        if self._memory is None or self._memory.shape[1] < share.numel():
            # Inputs stored in a smaller buffer keep it alive until they are released.
            self._memory = self._allocate(share, self._slots * share.numel()).view(self._slots, -1)
            self._free = list(range(self._slots))
        if not self._free:
            raise ModelError(
                f"more than {self._slots} inputs of recomputed layers must be stored at a time, but "
                "number_checkpoints limits the buffer to this number; increase it, or remove it"
            )
        slot = self._free.pop()
        weakref.finalize(kept, self._free.append, slot)
        return self._memory[slot, : share.numel()]

    def _allocate(self, like: Tensor, numel: int) -> Tensor:
        device = torch.device("cpu") if self._in_host else like.device
        pinned = self._in_host and like.device.type == "cuda"
        return torch.empty(numel, dtype=like.dtype, device=device, pin_memory=pinned)

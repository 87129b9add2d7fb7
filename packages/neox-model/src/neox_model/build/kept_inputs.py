"""Where the inputs of recomputed layers wait for the backward pass: shared out, in one buffer, on the host.

torch's checkpoint keeps a segment's inputs as saved tensors, so hooks on saved tensors are all this needs:
what waits is packed when it is saved and unpacked when its segment is computed again. DeepSpeed's checkpoint
functions do the same through a reentrant checkpoint and streams of a GPU; hooks work on any device.
"""

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from neox_model.errors import ModelError
from neox_model.parallel.collectives import all_gather
from neox_model.parallel.groups import SINGLE, Group

__all__ = ["InputKeeper"]


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Kept:
    """An input that waits: this rank's share of its numbers, and what makes it whole again."""

    share: Tensor
    shape: torch.Size
    device: torch.device


class InputKeeper:
    """Packs and unpacks the inputs of recomputed segments.

    Args:
        group: ranks that hold equal inputs and keep a share each; unpacking is collective over them.
        in_host: keep them in host memory (page-locked where they come from a GPU).
        slots: how many fit into one buffer that is allocated once; 0: as many as `expect` says; None: each
            has memory of its own.
    """

    def __init__(self, *, group: Group = SINGLE, in_host: bool = False, slots: int | None = None) -> None:
        self._group = group
        self._in_host = in_host
        self._slots = slots
        self._memory: Tensor | None = None
        self._free: list[int] = []

    def expect(self, inputs: int) -> None:
        """So many inputs wait at a time; sizes the buffer unless its size was given."""
        if self._slots == 0:
            self._slots = inputs

    def hooks(self) -> AbstractContextManager[None]:
        """Within, saved tensors are kept here."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Kept:
        if not tensor.is_floating_point():
            return tensor
        kept = _Kept(tensor.new_empty(0), tensor.shape, tensor.device)
        mine = self._my_share(tensor.detach())
        kept.share = self._place(kept, mine)
        kept.share.copy_(mine, non_blocking=kept.share.is_pinned())
        return kept

    def _unpack(self, kept: Tensor | _Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        share = kept.share.to(kept.device, non_blocking=kept.share.is_pinned())
        # The buffer's slot is another input's as soon as this one is dropped.
        share = share.clone() if share is kept.share else share
        return all_gather(share, self._group, dim=0)[: kept.shape.numel()].view(kept.shape)

    def _my_share(self, tensor: Tensor) -> Tensor:
        """This rank's run of the flat tensor; the last rank's is filled up with zeros to equal length."""
        flat = tensor.reshape(-1)
        length = -(-flat.numel() // self._group.size)
        mine = flat[self._group.rank * length : (self._group.rank + 1) * length]
        if mine.numel() < length:
            mine = torch.cat((mine, mine.new_zeros(length - mine.numel())))
        return mine

    def _place(self, kept: _Kept, share: Tensor) -> Tensor:
        """Memory for a share, given back when `kept` is dropped."""
        if self._slots is None:
            return self._allocate(share, share.numel())
        if self._memory is None or self._memory.shape[1] < share.numel():
            # Inputs that wait in a smaller buffer keep it alive until they are dropped.
            self._memory = self._allocate(share, self._slots * share.numel()).view(self._slots, -1)
            self._free = list(range(self._slots))
        if not self._free:
            raise ModelError(
                f"more than {self._slots} inputs of recomputed layers wait at a time, which is what "
                "number_checkpoints leaves room for; raise it, or leave it out"
            )
        slot = self._free.pop()
        weakref.finalize(kept, self._free.append, slot)
        return self._memory[slot, : share.numel()]

    def _allocate(self, like: Tensor, numel: int) -> Tensor:
        device = torch.device("cpu") if self._in_host else like.device
        pinned = self._in_host and like.device.type == "cuda"
        return torch.empty(numel, dtype=like.dtype, device=device, pin_memory=pinned)

"""A copy of a shard's bytes in host memory, which another process can write to disk."""

import logging
import mmap
import os

import torch
from torch import Tensor

from neox_model.checkpoint.shards import ShardPlan

__all__ = ["Snapshot"]

logger = logging.getLogger(__name__)


class Snapshot:
    """Host memory for one shard, kept and used again by later saves.

    The memory is a file without a name (memfd), which the shard writer opens by its number. For a GPU it is
    pinned, so that copies do not pass through the driver's buffers.

    Args:
        device: where the copied tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._device = device
        self._file: int | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @property
    def descriptor(self) -> int:
        """Return the number of the open file."""
        assert self._file is not None, "nothing has been copied"
        return self._file

    def take(self, plan: ShardPlan) -> None:
        """Copy a shard's bytes. They are complete on return.

        Raises:
            OSError: the host has not enough memory.
        """
        if self._bytes.numel() < plan.size:
            self._reserve(plan.size)
        header = torch.frombuffer(bytearray(plan.header), dtype=torch.uint8)
        self._bytes[: header.numel()].copy_(header)
        for part, (start, stop) in zip(plan.parts, plan.spans, strict=True):
            self._bytes[start:stop].copy_(_raw(part.values), non_blocking=True)
        if self._is_pinned:
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Release the memory."""
        if self._file is None:
            return
        if self._is_pinned and self._bytes.is_pinned():
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        # The mapping ends with the last tensor on it.
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self._file)
        self._file = None

    def _reserve(self, size: int) -> None:
        self.close()
        self._file = os.memfd_create("neox-snapshot")
        # Without it, a lack of memory would be a signal in the middle of the copy.
        os.posix_fallocate(self._file, 0, size)
        self._bytes = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        if self._is_pinned:
            self._pin()

    def _pin(self) -> None:
        code = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0)
        if int(code) != 0:
            logger.warning(
                "the memory for asynchronous saves cannot be pinned (CUDA error %d): copies are slower",
                int(code),
            )


def _raw(values: Tensor) -> Tensor:
    """Return the bytes of a flat tensor, on its device."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8)

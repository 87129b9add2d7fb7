"""A copy of a shard's bytes in host memory, which another process can write to disk."""

import logging
import mmap
import os
from threading import Thread, get_native_id

import torch
from torch import Tensor

from neox_model.checkpoint.shards import ShardPlan, raw_bytes

__all__ = ["Snapshot"]

logger = logging.getLogger(__name__)

_LOWEST_NICENESS = 19


class Snapshot:
    """Host memory for one shard, kept and used again by later saves.

    The memory is a file without a name (memfd), which the shard writer opens by its number. Tensors on the
    host are written to it by system calls, because mapping new memory costs more than the copy. For a GPU
    the file is mapped and pinned, so that copies do not pass through the driver's buffers.

    Args:
        device: where the copied tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._file: int | None = None
        self._size = 0
        self._mapped: Tensor | None = None
        self._reserving: Thread | None = None

    @property
    def descriptor(self) -> int:
        """Return the number of the open file."""
        assert self._file is not None, "nothing has been copied"
        return self._file

    def reserve(self, size: int) -> None:
        """Start to reserve memory, in a thread of the lowest priority; `take` waits for it."""
        self._reserving = Thread(target=self._try_to_reserve, args=(size,), daemon=True)
        self._reserving.start()

    def take(self, plan: ShardPlan) -> None:
        """Copy a shard's bytes. They are complete on return.

        Raises:
            OSError: the host has not enough memory.
        """
        self._wait()
        if self._size < plan.size:
            self._reserve(plan.size)
        _write(self.descriptor, memoryview(plan.header), 0)
        for part, (start, stop) in zip(plan.parts, plan.spans, strict=True):
            if self._mapped is None:
                _write(self.descriptor, raw_bytes(part.values), start)
            else:
                values = part.values.detach().contiguous().reshape(-1).view(torch.uint8)
                self._mapped[start:stop].copy_(values, non_blocking=True)
        if self._mapped is not None:
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Release the memory."""
        self._wait()
        self._release()

    def _wait(self) -> None:
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def _try_to_reserve(self, size: int) -> None:
        os.setpriority(os.PRIO_PROCESS, get_native_id(), _LOWEST_NICENESS)
        try:
            self._reserve(size)
        except OSError as error:
            self._release()
            logger.warning("cannot reserve memory for asynchronous saves: %s", error)

    def _reserve(self, size: int) -> None:
        self._release()
        self._file = os.memfd_create("neox-snapshot")
        # Without it, a lack of memory would end the process in the middle of the copy.
        os.posix_fallocate(self._file, 0, size)
        if self._device.type == "cuda":
            self._mapped = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
            _pin(self._mapped)
        self._size = size

    def _release(self) -> None:
        if self._mapped is not None and self._mapped.is_pinned():
            torch.cuda.cudart().cudaHostUnregister(self._mapped.data_ptr())
        # The mapping ends with its tensor.
        self._mapped, self._size = None, 0
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _pin(memory: Tensor) -> None:
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code != 0:
        logger.warning(
            "the memory for asynchronous saves cannot be pinned (CUDA error %d): copies are slower", code
        )


def _write(file: int, data: memoryview, offset: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(file, data[written:], offset + written)

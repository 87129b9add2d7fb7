"""A copy of a shard's bytes in host memory, which another process can write to disk."""

import logging
import mmap
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import get_native_id
from typing import Any

import torch
from torch import Tensor

from neox_model.checkpoint import priority
from neox_model.checkpoint.shards import ShardPlan, raw_bytes

__all__ = ["Snapshot", "in_thread"]

logger = logging.getLogger(__name__)

_MEMORY = Path("/proc/meminfo")
_CHUNK_BYTES = 2**30


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
        self._is_pinned = False
        self._reserving: Future[None] | None = None

    @property
    def descriptor(self) -> int:
        """Return the number of the open file."""
        assert self._file is not None, "nothing has been copied"
        return self._file

    def reserve(self, size: int) -> None:
        """Start to reserve memory, in a thread of the lowest priority; `take` waits for it."""
        self._reserving = in_thread(self._try_to_reserve, size)

    def take(self, plan: ShardPlan) -> None:
        """Copy a shard's bytes. They are complete on return.

        Raises:
            OSError: the host has not enough memory.
        """
        if self._reserving is not None:
            self._reserving.result()
        if self._size < plan.size:
            in_thread(self._reserve, plan.size).result()
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
        if self._reserving is not None:
            self._reserving.result()
        self._release()

    def _try_to_reserve(self, size: int) -> None:
        priority.lower(get_native_id())
        try:
            self._reserve(size)
        except (OSError, RuntimeError) as error:
            # `take` tries again, and its failure is that of the save.
            logger.warning("cannot reserve memory for asynchronous saves: %s", error)

    def _reserve(self, size: int) -> None:
        """Reserve memory in a separate thread.

        CUDA keeps an error of pinning for the thread in which it occurred: in the training thread, the next
        kernel would be reported as failed.
        """
        if self._device.type == "cuda":
            # A new thread uses device 0, and would create a context there.
            torch.cuda.set_device(self._device)
        self._release()
        try:
            self._file = os.memfd_create("neox-snapshot")
            _allocate(self._file, size)
            if self._device.type == "cuda":
                self._mapped = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
                self._is_pinned = _pin(self._mapped)
        except (OSError, RuntimeError):
            self._release()
            raise
        self._size = size

    def _release(self) -> None:
        if self._is_pinned:
            assert self._mapped is not None, "what is pinned is mapped"
            torch.cuda.cudart().cudaHostUnregister(self._mapped.data_ptr())
        # The mapping ends with its tensor.
        self._mapped, self._is_pinned, self._size = None, False, 0
        if self._file is not None:
            os.close(self._file)
            self._file = None


def in_thread(action: Callable[..., None], *arguments: Any) -> "Future[None]":
    """Start a function in a separate thread, which the process waits for when it exits."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    future = pool.submit(action, *arguments)
    pool.shutdown(wait=False)
    return future


def _allocate(file: int, size: int) -> None:
    """Give the file its memory; otherwise a lack of it would end the process in the middle of the copy.

    Raises:
        OSError: the host has not enough memory.
    """
    for start in range(0, size, _CHUNK_BYTES):
        # Again for each chunk: other ranks of the host reserve memory at the same time. What can be used
        # without swapping counts; a container's limit is not read.
        (kilobytes,) = re.findall(r"MemAvailable:\s+(\d+)", _MEMORY.read_text(encoding="ascii"))
        missing, available = size - start, int(kilobytes) * 1024
        if missing > available:
            raise OSError(
                f"the copy of {size:,} bytes that an asynchronous save writes needs {missing:,} more bytes "
                f"of host memory, of which {available:,} are available; set async-save: false"
            )
        os.posix_fallocate(file, start, min(_CHUNK_BYTES, missing))


def _pin(memory: Tensor) -> bool:
    """Pin the memory if possible; return whether it is pinned."""
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code != 0:
        logger.warning(
            "the memory for asynchronous saves cannot be pinned (CUDA error %d): copies are slower", code
        )
    return code == 0


def _write(file: int, data: memoryview, offset: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(file, data[written:], offset + written)

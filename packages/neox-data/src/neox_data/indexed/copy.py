"""Copy bytes between files: in the kernel, by reference if the file system supports it, or hashing them."""

import errno
import os
from collections.abc import Sequence
from typing import BinaryIO, Protocol

__all__ = ["Digest", "copy_bytes"]

_BLOCK_BYTES = 16 << 20

_UNSUPPORTED = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Digest(Protocol):
    """A hash of the bytes that it was given."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return the hash in hexadecimal digits."""


def copy_bytes(
    source: BinaryIO, target: BinaryIO, *, first: int, count: int, digests: Sequence[Digest] = ()
) -> None:
    """Append `count` bytes of `source`, starting at byte `first`, to `target`.

    Args:
        source: file to copy from.
        target: file to copy to.
        first: first byte.
        count: number of bytes.
        digests: are given the copied bytes; without any, the kernel copies.

    Raises:
        EOFError: the source is too short.
    """
    target.flush()
    target.seek(0, os.SEEK_END)
    while count:
        if digests:
            copied = _copy_through_memory(source, target, first=first, count=count, digests=digests)
        else:
            copied = _copy_in_kernel(source, target, first=first, count=count)
        if not copied:
            raise EOFError(f"{source.name} ends {count:,} bytes early")
        first, count = first + copied, count - copied
        target.seek(0, os.SEEK_END)


def _copy_in_kernel(source: BinaryIO, target: BinaryIO, *, first: int, count: int) -> int:
    try:
        return os.copy_file_range(
            source.fileno(), target.fileno(), count, offset_src=first, offset_dst=target.tell()
        )
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return _copy_through_memory(source, target, first=first, count=count)


def _copy_through_memory(
    source: BinaryIO, target: BinaryIO, *, first: int, count: int, digests: Sequence[Digest] = ()
) -> int:
    source.seek(first)
    block = source.read(min(count, _BLOCK_BYTES))
    for digest in digests:
        digest.update(block)
    target.write(block)
    target.flush()
    return len(block)

"""Bytes copied from file to file by the kernel, by reference where the file system can do that."""

import errno
import os
from typing import BinaryIO

__all__ = ["copy_bytes"]

_NOT_HERE = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def copy_bytes(source: BinaryIO, target: BinaryIO, *, first: int, count: int) -> None:
    """Append `count` bytes of `source`, from byte `first` on, to `target`.

    Raises:
        EOFError: the source is shorter.
    """
    target.flush()
    target.seek(0, os.SEEK_END)
    while count:
        try:
            copied = os.copy_file_range(
                source.fileno(), target.fileno(), count, offset_src=first, offset_dst=target.tell()
            )
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            copied = _copy_through_memory(source, target, first=first, count=count)
        if not copied:
            raise EOFError(f"{source.name} ends {count:,} bytes early")
        first, count = first + copied, count - copied
        target.seek(0, os.SEEK_END)


def _copy_through_memory(source: BinaryIO, target: BinaryIO, *, first: int, count: int) -> int:
    source.seek(first)
    block = source.read(min(count, 16 << 20))
    target.write(block)
    target.flush()
    return len(block)

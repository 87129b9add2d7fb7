"""What the launcher says and passes on; a terminal or a reader that has gone ends no job."""

import os
import sys
from contextlib import suppress
from typing import TextIO

__all__ = ["pass_on", "tell"]


def tell(text: str) -> None:
    """Say something to the user, on stderr."""
    with suppress(OSError):  # The terminal may be what went away.
        sys.stderr.write(text)
        sys.stderr.flush()


def pass_on(stream: TextIO | None, data: bytes) -> None:
    """Print what a worker has printed; when the reader (`| head`, a terminal) has gone, work goes on unseen.

    Args:
        stream: sys.stdout or sys.stderr.
        data: as it came.
    """
    if stream is None:
        return
    try:
        stream.flush()
        stream.buffer.write(data)
        stream.buffer.flush()
    except OSError:
        # What is still buffered must go somewhere: Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

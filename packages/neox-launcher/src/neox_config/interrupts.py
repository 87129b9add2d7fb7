"""Ctrl-C while a command is being imported, before it can report it.

Each package that other packages do not depend on has a copy, which tests compare.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["importing"]

_INTERRUPTED = 130


@contextmanager
def importing() -> Iterator[None]:
    """End the process at once, without a traceback, on Ctrl-C within this context.

    An exception would not do: Python ignores it where it is raised in a callback, and the command would run.
    """
    before = signal.getsignal(signal.SIGINT)
    # Not if the program that started this one has Ctrl-C ignored.
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

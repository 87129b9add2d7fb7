"""Ctrl-C while a command is being imported, before it can report it.

Each package that other packages do not depend on has a copy, which tests compare.
"""

import os
import signal
from types import FrameType, TracebackType

__all__ = ["Importing"]

_INTERRUPTED = 130


class Importing:
    """Within this context, Ctrl-C ends the process at once, without a traceback.

    An exception would not do: Python ignores it where it is raised in a callback, and the command would run.
    """

    def __enter__(self) -> None:
        """Set the handler, unless the program that started this one has Ctrl-C ignored."""
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, _end)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the handler."""
        signal.signal(signal.SIGINT, self._before)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)

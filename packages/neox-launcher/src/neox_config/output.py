"""Standard output that cannot be written to, such as a file on a full disk, reported in one line."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

__all__ = ["OutputError", "checked_output"]


class OutputError(Exception):
    """Standard output cannot be written to; not an OSError, so that no command blames one of its files."""


@contextmanager
def checked_output() -> Iterator[None]:
    """End a command with exit code 1 and one line if standard output cannot be written to.

    Python would show a traceback, and would try to write the rest again when it exits.
    """
    # A closed one (`>&-`) is a file that cannot be written to, too.
    stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    checked: Any = _Checked(stdout)
    sys.stdout = checked
    try:
        try:
            yield
        finally:
            with suppress(BrokenPipeError):
                checked.flush()
    except OutputError as error:
        sys.stderr.write(f"standard output cannot be written to: {error}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        sys.exit(1)
    finally:
        # click replaces it if its reader is gone (`| head`).
        if sys.stdout is checked:
            sys.stdout = stdout


class _Checked:
    """Standard output whose errors are OutputErrors, except that of a reader that is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text; characters that its encoding lacks, and bytes of file names, are escaped."""
        with _as_output_error():
            try:
                return self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding
                return self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def flush(self) -> None:
        """Write what is buffered."""
        with _as_output_error():
            self._stream.flush()


@contextmanager
def _as_output_error() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.strerror) from error

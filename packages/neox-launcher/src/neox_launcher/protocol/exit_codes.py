"""Exit codes of processes, as a shell shows them."""

__all__ = ["SIGNALLED", "as_exit_code"]

SIGNALLED = 128
"""Added to a signal number to form the exit code of a process that the signal ended."""


def as_exit_code(code: int) -> int:
    """Return a `subprocess` return code, negative for a signal, as a shell shows it."""
    return code if code >= 0 else SIGNALLED - code

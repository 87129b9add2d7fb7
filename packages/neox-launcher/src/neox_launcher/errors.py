"""What can go wrong, each with the exit code of a command that ends by it."""

from collections.abc import Sequence
from typing import Any

__all__ = ["ConfigError", "HostfileError", "LaunchError", "NeoXError"]


class NeoXError(Exception):
    """Base of the errors whose message is written for the user; shown without a traceback.

    `exit_code` is 1 when the work failed and 2 when the request was wrong.
    """

    exit_code = 1


class ConfigError(NeoXError):
    """The configuration cannot be used; the message lists every problem found.

    Args:
        message: all problems as text, with file, line and remedy.
        problems: the same as `neox_launcher.config.problems.Problem` records.
    """

    exit_code = 2

    def __init__(self, message: str, problems: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class HostfileError(NeoXError):
    """The list of hosts cannot be read or does not hold what was asked for."""

    exit_code = 2


class LaunchError(NeoXError):
    """The workers cannot be started as asked."""

    exit_code = 2

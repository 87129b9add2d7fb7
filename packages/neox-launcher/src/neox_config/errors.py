"""Exceptions of the project, with the exit codes of commands that fail with them."""

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["ConfigError", "HostfileError", "LaunchError", "NeoXError"]


class NeoXError(Exception):
    """Base class of errors that are shown to the user without a traceback.

    `exit_code` is 1 if the command failed, 2 if the request was invalid; some errors have one of their own.

    Args:
        args: the message.
        code: which check failed; by default the name of the class, such as `hostfile` of `HostfileError`.
    """

    exit_code = 1
    is_of_another_rank = False
    """The failure of another rank, which reports it as well."""
    is_refused_start = False
    """The start was refused in favour of a running one: not a failure of the run that both would write to."""

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        name = type(self).__name__.removesuffix("Error")
        self.code = code or re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


class ConfigError(NeoXError):
    """The configuration is invalid; the message lists every problem.

    Args:
        message: all problems as text, with file, line and remedy.
        problems: the problems as `neox_config.problems.Problem` records.
        code: as of NeoXError.
    """

    exit_code = 2

    def __init__(self, message: str, problems: Sequence[Any] = (), *, code: str = "") -> None:
        super().__init__(message, code=code)
        self.problems = tuple(problems)


class HostfileError(NeoXError):
    """The hostfile cannot be read, or does not contain the requested hosts or devices."""

    exit_code = 2


class LaunchError(NeoXError):
    """The workers cannot be started as requested."""

    exit_code = 2

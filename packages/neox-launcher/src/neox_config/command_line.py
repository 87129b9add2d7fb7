"""Commands whose help ends with examples and exit codes, and which report each error in one message.

neox-data and neox-kernels, which do not depend on this package, have commands of their own.
"""

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from traceback import walk_tb
from typing import Any, ClassVar, TypeVar

import click
import cloup

from neox_config.atomic import NO_ROOM
from neox_config.errors import NeoXError

__all__ = ["INTERRUPTED", "PATH", "Command", "GivenPath", "Group", "NamedPath", "option"]

INTERRUPTED = 130
"""Exit code after Ctrl-C, that of a shell for a program that SIGINT ended."""

PATH = click.Path(readable=False)
"""Type of a file or folder that shells complete; the command itself checks whether it can be read."""

_EXIT_CODES = {0: "success", 1: "failure", 2: "invalid request", INTERRUPTED: "interrupted by Ctrl-C"}
_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110}
# Reasons for which a path is an invalid request.
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
_REMEDIES = dict.fromkeys(_UNUSABLE, "; give another path") | dict.fromkeys(NO_ROOM, "; free disk space")
_group = cache(cloup.OptionGroup)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class GivenPath(click.Path):
    """A path; an empty one, as of a shell variable without a value, is refused: it would mean `.`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check that there is a path."""
        if not str(value):
            self.fail("is empty; give a path (. is the current folder)", param, ctx)
        return super().convert(value, param, ctx)


class NamedPath(click.Path):
    """A path to write, whose name must end as files of its format do: no other file can be overwritten."""

    def __init__(self, ending: str) -> None:
        super().__init__(path_type=Path, dir_okay=False, readable=False)
        self.ending = ending

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the ending."""
        if not str(value).lower().endswith(self.ending):
            self.fail(f"{value}: choose a name that ends in {self.ending}", param, ctx)
        return super().convert(value, param, ctx)


def option(*names: str, heading: str, **settings: Any) -> Callable[[_Function], _Function]:
    """Add an option that `--help` lists under a heading; otherwise like `cloup.option`."""
    return cloup.option(*names, group=_group(heading), **settings)


class Command(cloup.Command):
    """A command.

    Args:
        examples: complete command lines.
        exit_codes: meanings that differ from the usual ones.
    """

    error_prefix: ClassVar[str] = "Error: "
    """What stands before the message of a NeoXError."""

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str] = (),
        exit_codes: Mapping[Any, str] | None = None,
        **kwargs: Any,
    ) -> None:
        lines = ["\b", "Examples:", *(f"  {each}" for each in examples), "", "\b", "Exit codes:"]
        lines += (f"  {code:<4} {what}" for code, what in {**_EXIT_CODES, **(exit_codes or {})}.items())
        super().__init__(*args, **{"context_settings": _SETTINGS, "epilog": "\n".join(lines), **kwargs})
        self.examples = tuple(examples)

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return the whole first sentence."""
        return super().get_short_help_str(1_000)

    def make_option_group_help_section(self, group: cloup.OptionGroup, ctx: click.Context) -> Any:
        """Describe a group, with the options of this command: commands share groups."""
        if group in self.option_groups:
            group.options = [each for each in self.params if getattr(each, "group", None) is group]  # type: ignore[misc]
        return super().make_option_group_help_section(group, ctx)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program, and report its error."""
        # A closed standard output (`>&-`) is one that cannot be written to.
        sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
        # Bytes of file names, and characters that its encoding lacks, are escaped.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            return super().main(*args, **kwargs)
        except (NeoXError, OSError, UnicodeEncodeError) as error:
            click.echo(self._report(error), err=True)
            is_request = getattr(error, "errno", None) in _UNUSABLE or isinstance(error, UnicodeEncodeError)
            sys.exit(getattr(error, "exit_code", 2 if is_request else 1))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; click's own exit code after Ctrl-C is 1."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            click.echo("\ninterrupted", err=True)
            ctx.exit(INTERRUPTED)

    def _report(self, error: Exception) -> str:
        """Return the message about an error."""
        if isinstance(error, UnicodeEncodeError):
            return f"Error: {error}; write it in UTF-8, or set PYTHONUTF8=1"
        if not isinstance(error, OSError):
            return f"{self.error_prefix}{error}"
        if any(frame.f_code is click.echo.__code__ for frame, _ in walk_tb(error.__traceback__)):
            # Python would write the rest when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return f"standard output cannot be written to: {error.strerror}"
        place = f"{error.filename}: " if error.filename else ""
        return f"Error: {place}{error.strerror or error}{_REMEDIES.get(error.errno or 0, '')}"


class Group(Command, click.Group):
    """A program with commands."""

    command_class = Command

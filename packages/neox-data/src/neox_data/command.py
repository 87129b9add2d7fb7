"""Shared parts of the package's commands: help, exit codes, error messages, and options."""

import errno
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from traceback import walk_tb
from typing import Any

import click
import cloup

from neox_data.errors import DataError
from neox_data.whole_files import NO_ROOM

__all__ = [
    "Command",
    "Group",
    "corpus_files_option",
    "jsonl_key_option",
    "log_interval_option",
    "more_files_argument",
    "quiet_option",
    "verbose_option",
]

_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110}
_EXIT_CODES = {0: "success", 1: "failure", 2: "invalid request", 130: "interrupted by Ctrl-C"}
# Reasons for which a path is an invalid request.
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
_REMEDIES = dict.fromkeys(_UNUSABLE, "; give another path") | dict.fromkeys(NO_ROOM, "; free disk space")

quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="Show no progress; notes and errors are printed."
)
verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=lambda context, option, given: given and logging.basicConfig(level="INFO", format="%(message)s"),
    help="Log what the command does, on stderr.",
)
corpus_files_option = click.option(
    "--input",
    "inputs",
    required=True,
    multiple=True,
    metavar="FILE",
    help="Corpus files, as for preprocess_data.",
)
more_files_argument = click.argument("more", nargs=-1, metavar="[FILE]...")
"""The further files of `--input *.jsonl`."""
jsonl_key_option = click.option(
    "--jsonl-key",
    "--jsonl-keys",
    "--json-keys",
    "jsonl_key",
    default="text",
    help="Key of the text in each JSON line, or column of a table.",
)
log_interval_option = click.option(
    "--log-interval",
    type=click.IntRange(1),
    default=10_000,
    help="Minimum number of documents between progress lines if the output is not a terminal; documents are "
    "counted a batch at a time.",
)


class Command(cloup.Command):
    """A command whose help ends with examples and exit codes, and which reports each error in one message.

    Args:
        examples: complete command lines.
        exit_codes: meanings that differ from the usual ones.
    """

    def __init__(
        self, *args: Any, examples: Sequence[str] = (), exit_codes: Mapping[int, str] | None = None, **kw: Any
    ) -> None:
        codes = (f"  {code:<4} {what}" for code, what in (_EXIT_CODES | dict(exit_codes or {})).items())
        lines = ["\b", "Examples:", *(f"  {each}" for each in examples), "", "\b", "Exit codes:", *codes]
        super().__init__(*args, **{"context_settings": _SETTINGS, "epilog": "\n".join(lines), **kw})

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return the whole first sentence."""
        return super().get_short_help_str(1_000)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program, and report its error."""
        # A closed standard output (`>&-`) is one that cannot be written to.
        sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
        # Bytes of file names, and characters that its encoding lacks, are escaped.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            return super().main(*args, **kwargs)
        except (DataError, OSError, UnicodeEncodeError, MemoryError) as error:
            click.echo(_report(error), err=True)
            is_request = getattr(error, "errno", None) in _UNUSABLE or isinstance(error, UnicodeEncodeError)
            sys.exit(getattr(error, "exit_code", 2 if is_request else 1))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; click's own exit code after Ctrl-C is 1."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            click.echo("\ninterrupted", err=True)
            ctx.exit(130)


class Group(Command, click.Group):
    """A program with commands."""

    command_class = Command


def _report(error: Exception) -> str:
    """Return the message about an error."""
    if not isinstance(error, OSError):
        remedy = "; write it in UTF-8, or set PYTHONUTF8=1" if isinstance(error, UnicodeEncodeError) else ""
        return f"Error: {str(error) or 'out of memory'}{remedy}"
    if any(frame.f_code is click.echo.__code__ for frame, _ in walk_tb(error.__traceback__)):
        # Python would write the rest when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return f"standard output cannot be written to: {error.strerror}"
    place = f"{error.filename}: " if error.filename else ""
    return f"Error: {place}{error.strerror or error}{_REMEDIES.get(error.errno or 0, '')}"

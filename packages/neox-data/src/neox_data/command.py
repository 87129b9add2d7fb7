"""Shared parts of the package's commands: error messages, and options."""

from collections.abc import Iterable, Iterator
from typing import Any

import click

from neox_data.errors import DataError
from neox_data.output import checked_output
from neox_data.whole_files import NO_ROOM

__all__ = [
    "CONTEXT_SETTINGS",
    "DataCommand",
    "DataCommands",
    "corpus_files_option",
    "jsonl_key_option",
    "log_interval_option",
    "one_option_per_word",
]

# Settings of every command; those of a group inherit them.
CONTEXT_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "show_default": True,
    "max_content_width": 110,
}

_MAKE_ROOM = "; incomplete files were removed; free disk space or choose another location, and start again"

corpus_files_option = click.option(
    "--input",
    "inputs",
    required=True,
    multiple=True,
    metavar="FILE...",
    help="Corpus files, as for preprocess_data.",
)
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
    help="Documents between progress lines if the output is not a terminal.",
)


class DataCommands(click.Group):
    """Command group that reports a standard output that cannot be written to, such as a full disk."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        with checked_output():
            return super().main(*args, **kwargs)


class DataCommand(click.Command):
    """A command that reports errors in one sentence.

    The exit code is 2 for an invalid request (`DataError`) and 1 for a failure (`OSError`).

    Args:
        several: options that take several values, as with argparse: `--input a.jsonl b.jsonl`.
    """

    def __init__(self, *args: Any, several: Iterable[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._several = frozenset(several)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line."""
        return super().parse_args(ctx, list(one_option_per_word(args, self._several)))

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command as a standalone program."""
        with checked_output():
            return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except DataError as error:
            raise _BadRequest(str(error)) from error
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            remedy = _MAKE_ROOM if error.errno in NO_ROOM else ""
            raise click.ClickException(f"{place}{error.strerror or error}{remedy}") from error


def one_option_per_word(args: Iterable[str], several: frozenset[str]) -> Iterator[str]:
    """Yield `--input a b` as `--input a --input b`, for the options named in `several`."""
    option, is_first = "", True
    for word in args:
        if word.startswith("-"):
            option, is_first = (word if word in several else ""), True
            yield word
            continue
        if option and not is_first:
            yield option
        is_first = False
        yield word


class _BadRequest(click.ClickException):
    exit_code = 2

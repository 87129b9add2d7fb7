"""What the package's commands share: errors as one sentence, and options that take several words."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

import click

from neox_data.errors import DataError
from neox_data.whole_files import NO_ROOM

__all__ = ["CONTEXT_SETTINGS", "DataCommand", "ended_by_ctrl_c", "one_option_per_word"]

# Of every command; those of a group take them over from the group.
CONTEXT_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "show_default": True,
    "max_content_width": 110,
}

_MAKE_ROOM = "; nothing half-written was left: make room there, or choose another place, and start again"


class DataCommand(click.Command):
    """A command that says in one sentence what went wrong.

    The exit code is 2 where the request was wrong (`DataError`), 1 where the work failed (`OSError`).

    Args:
        several: options that take several words, as argparse programs write it: `--input a.jsonl b.jsonl`.
    """

    def __init__(self, *args: Any, several: Iterable[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._several = frozenset(several)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words of the command line."""
        return super().parse_args(ctx, list(one_option_per_word(args, self._several)))

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


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once, for work in a library that does not return before it is done.

    Nothing that runs later is told of it, so what the block writes must appear whole or not at all.
    """
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def one_option_per_word(args: Iterable[str], several: frozenset[str]) -> Iterator[str]:
    """`--input a b` as `--input a --input b`, for the options named in `several`."""
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

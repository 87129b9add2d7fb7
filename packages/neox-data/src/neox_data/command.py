"""Shared parts of the package's commands: help, exit codes, error messages, and options."""

import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from neox_data.errors import DataError
from neox_data.output import checked_output
from neox_data.whole_files import NO_ROOM

__all__ = [
    "DataCommand",
    "DataCommands",
    "GivenPath",
    "NamedPath",
    "corpus_files_option",
    "jsonl_key_option",
    "log_interval_option",
    "one_option_per_word",
    "option",
    "quiet_option",
    "verbose_option",
]

_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110}
_FAILURE, _INVALID, _INTERRUPTED = 1, 2, 130
_EXIT_CODES = {
    0: "success",
    _FAILURE: "failure",
    _INVALID: "invalid request",
    _INTERRUPTED: "interrupted by Ctrl-C",
}
# What to do about a path that cannot be used, whatever the command does with it; the request is invalid.
_REMEDIES = {
    errno.EACCES: "change its permissions, or give another path",
    errno.EPERM: "change its permissions, or give another path",
    errno.EROFS: "give a path of a file system that can be written to",
    errno.ENAMETOOLONG: "give a shorter path",
}
_MAKE_ROOM = "incomplete files were removed; free disk space or choose another location, and start again"
_OTHERS = "Options"

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Option(click.Option):
    """An option that `--help` lists under a heading."""

    def __init__(self, *args: Any, heading: str = _OTHERS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


def option(*names: str, heading: str, **settings: Any) -> Callable[[_Function], _Function]:
    """Add an option that `--help` lists under a heading; otherwise like `click.option`."""
    return click.option(*names, cls=_Option, heading=heading, **settings)


class GivenPath(click.Path):
    """A path; an empty one, as of a shell variable without a value, is refused: it would mean `.`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check that there is a path."""
        if not str(value):
            self.fail("is empty; give a path (. is the current folder)", param, ctx)
        return super().convert(value, param, ctx)


class NamedPath(GivenPath):
    """A path to write, whose name must end as files of its format do: no other file can be overwritten."""

    def __init__(self, ending: str) -> None:
        super().__init__(path_type=Path, dir_okay=False, readable=False)
        self.ending = ending

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the ending."""
        path = super().convert(value, param, ctx)
        if not str(value).lower().endswith(self.ending):
            self.fail(f"{value}: choose a name that ends in {self.ending}", param, ctx)
        return path


def _log_more(context: click.Context, parameter: click.Parameter, is_verbose: bool) -> None:
    # Without a handler, Python prints warnings alone.
    if is_verbose:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        for package in ("neox_config", "neox_data", "neox_model"):
            logging.getLogger(package).setLevel(logging.INFO)


quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="Show no progress; notes and errors are printed."
)
verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=_log_more,
    help="Log what the command does, on stderr.",
)
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
    help="Minimum number of documents between progress lines if the output is not a terminal; documents are "
    "counted a batch at a time.",
)


class DataCommand(click.Command):
    """A command whose help has examples and exit codes, and whose errors are one sentence.

    Args:
        several: options that take several values, as with argparse: `--input a.jsonl b.jsonl`.
        examples: complete command lines, for `--help`.
        exit_codes: what exit codes mean, if not only success, failure, invalid request and Ctrl-C.
    """

    def __init__(
        self,
        *args: Any,
        several: Iterable[str] = (),
        examples: Iterable[str] = (),
        exit_codes: Mapping[int, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **{"context_settings": _SETTINGS, **kwargs})
        self._several = frozenset(several)
        self.examples = tuple(examples)
        self.exit_codes = {**_EXIT_CODES, **(exit_codes or {})}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line."""
        return super().parse_args(ctx, list(one_option_per_word(args, self._several)))

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; a standard output that cannot be written to, such as a full disk, is reported."""
        with checked_output():
            return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            # After the terminal's ^C.
            click.echo("\ninterrupted", err=True)
            ctx.exit(_INTERRUPTED)
        except BrokenPipeError:
            raise
        except MemoryError as error:
            what = f"out of memory ({error})" if str(error) else "out of memory"
            click.ClickException(f"{what}; use a host with more, or less data").show()
            ctx.exit(_FAILURE)
        except DataError as error:
            click.ClickException(str(error)).show()
            ctx.exit(error.exit_code)
        except UnicodeEncodeError as error:
            click.ClickException(f"{error}; write it in UTF-8, or set PYTHONUTF8=1").show()
            ctx.exit(_INVALID)
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            remedy = _MAKE_ROOM if error.errno in NO_ROOM else _REMEDIES.get(error.errno or 0)
            text = f"{place}{error.strerror or error}" + (f"; {remedy}" if remedy else "")
            click.ClickException(text).show()
            ctx.exit(_INVALID if error.errno in _REMEDIES else _FAILURE)

    def get_short_help_str(self, limit: int = 1_000) -> str:
        """Return the first sentence of the help, which click would cut to one line."""
        return super().get_short_help_str(1_000)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings, in the order of declaration; those without one last."""
        headings: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if record is not None:
                headings.setdefault(getattr(param, "heading", _OTHERS), []).append(record)
        for heading in sorted(headings, key=_OTHERS.__eq__):
            with formatter.section(heading):
                formatter.write_dl(headings[heading])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples and the exit codes."""
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in self.examples))
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in self.exit_codes.items()])


class DataCommands(DataCommand, click.Group):
    """A program with such commands."""

    command_class = DataCommand

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings, then the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


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

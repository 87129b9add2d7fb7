"""Commands of a program: help with headings, examples and exit codes; errors in one sentence.

neox-data and neox-kernels, which do not depend on this package, have commands of their own.
"""

import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click

from neox_config.output import checked_output

__all__ = [
    "INTERRUPTED",
    "PATH",
    "Command",
    "GivenPath",
    "Group",
    "NamedPath",
    "Option",
    "about_encoding",
    "option",
    "quiet_option",
    "verbose_option",
]

INTERRUPTED = 130
"""Exit code after Ctrl-C, that of a shell for a program that SIGINT ended."""

PATH = click.Path(readable=False)
"""Type of a file or folder that shells complete; the command itself checks whether it can be read."""

_FAILURE, _INVALID = 1, 2
_EXIT_CODES: Mapping[int | str, str] = {
    0: "success",
    _FAILURE: "failure",
    _INVALID: "invalid request",
    INTERRUPTED: "interrupted by Ctrl-C",
}
_PERMISSION = "change its permissions, or give another path"
# What to do about a path that cannot be used, whatever the command does with it; the request is invalid.
_REMEDIES: Mapping[int | None, str] = {
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "give a path of a file system that can be written to",
    errno.ENAMETOOLONG: "give a shorter path",
}
_SETTINGS: Mapping[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "show_default": True,
    "max_content_width": 110,
}
# Click's names of types in its errors, in the words that people use.
_NO_NUMBERS: Mapping[str, str] = {
    "is not a valid integer range": "is not a whole number",
    "is not a valid integer": "is not a whole number",
    "is not a valid float range": "is not a number",
    "is not a valid float": "is not a number",
}
_OTHERS = "Options"
_LONGEST_SENTENCE = 1_000
# Similarity above which an option is suggested for another; click's own, 0.6, suggests --help for --model.
_NEAR = 0.75
_ENDINGS = (".yml", ".yaml", ".json", ".jsonl")
_PACKAGES = ("neox_config", "neox_launcher", "neox_data", "neox_kernels", "neox_model")

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Option(click.Option):
    """An option of a command.

    Args:
        heading: title under which `--help` lists it.
    """

    def __init__(self, *args: Any, heading: str = _OTHERS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


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


def option(*names: str, heading: str, **settings: Any) -> Callable[[_Function], _Function]:
    """Add an option that `--help` lists under a heading; otherwise like `click.option`."""
    return click.option(*names, cls=Option, heading=heading, **settings)


def _log_more(context: click.Context, parameter: click.Parameter, is_verbose: bool) -> None:
    # Without a handler, Python prints warnings alone.
    if is_verbose:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        for package in _PACKAGES:
            logging.getLogger(package).setLevel(logging.INFO)


def about_encoding(error: UnicodeEncodeError) -> str | None:
    """Return the sentence about a character that the environment's encoding lacks; None: another cause."""
    encoding = sys.getfilesystemencoding()
    character = error.object[error.start]
    # Python represents bytes that it cannot decode by these characters.
    is_byte = "\udc80" <= character <= "\udcff"
    if encoding == "utf-8" and not is_byte:
        return None
    what = f"the byte 0x{ord(character) - 0xDC00:02x}" if is_byte else repr(character)
    remedy = "rename the file, or write the text in UTF-8" if encoding == "utf-8" else "set PYTHONUTF8=1"
    return (
        f"{what} in a file name or a text cannot be {'decoded' if is_byte else 'encoded'} as {encoding}, the "
        f"encoding of this environment; {remedy}"
    )


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


class Command(click.Command):
    """A command that describes itself completely, and reports errors in one sentence.

    Args:
        examples: complete command lines, for `--help`.
        exit_codes: what exit codes mean, if not only success, failure, invalid request and Ctrl-C.
    """

    reported: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors that are shown to the user without a traceback.

    Their exit code is `exit_code`; otherwise 2 for a path that may not be used, and 1.
    """

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str] = (),
        exit_codes: Mapping[int | str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["context_settings"] = {**_SETTINGS, **(kwargs.get("context_settings") or {})}
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        self.exit_codes = {**_EXIT_CODES, **(exit_codes or {})}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; name expected numbers in plain words, and suggest only options that are near."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            near = _near_options(error.option_name, self.get_params(ctx))
            raise click.NoSuchOption(error.option_name, possibilities=near, ctx=error.ctx) from error
        except click.BadParameter as error:
            found = next((name for name in _NO_NUMBERS if name in error.message), None)
            if found is None:
                raise
            message = error.message.replace(found, _NO_NUMBERS[found])
            raise click.BadParameter(message, ctx=error.ctx, param=error.param) from error

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
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            raise
        except UnicodeEncodeError as error:
            sentence = about_encoding(error)
            if sentence is None:
                raise
            click.ClickException(sentence).show()
            ctx.exit(_INVALID)
        except self.reported as error:
            click.ClickException(self.message(error)).show()
            is_request = isinstance(error, OSError) and error.errno in _REMEDIES
            ctx.exit(getattr(error, "exit_code", _INVALID if is_request else _FAILURE))

    def message(self, error: Exception) -> str:
        """Return the sentence that reports an error."""
        if not isinstance(error, OSError):
            return str(error)
        place = f"{error.filename}: " if error.filename else ""
        remedy = f"; {_REMEDIES[error.errno]}" if error.errno in _REMEDIES else ""
        return f"{place}{error.strerror or error}{remedy}"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings, in the order of declaration; those without one last."""
        headings: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if record is not None:
                heading = param.heading if isinstance(param, Option) else _OTHERS
                headings.setdefault(heading, []).append(record)
        for heading in sorted(headings, key=_OTHERS.__eq__):
            with formatter.section(heading):
                formatter.write_dl(headings[heading])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples and the exit codes."""
        if self.examples:
            with formatter.section("Examples"):
                indent = " " * formatter.current_indent
                formatter.write("".join(f"{indent}{line}\n" for line in self.examples))
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in self.exit_codes.items()])


def _near_options(name: str, params: Sequence[click.Parameter]) -> list[str]:
    """Return the options that are spelled almost like a name; else those that begin it."""
    names = [each for param in params if isinstance(param, click.Option) for each in param.opts]
    near = get_close_matches(name, names, cutoff=_NEAR)
    return near or [each for each in names if each.startswith("--") and name.startswith(f"{each}-")]


def _is_file(word: str) -> bool:
    return word.endswith(_ENDINGS) or "/" in word or os.path.exists(word)


class Group(Command, click.Group):
    """A program with commands.

    Args:
        for_files: the command that an error suggests if a file is given in place of a command.
    """

    command_class = Command

    def __init__(self, *args: Any, for_files: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.for_files = for_files

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names; report a file in its place with a command for it."""
        word = args[0]
        if self.get_command(ctx, word) is not None or ctx.resilient_parsing or word.startswith("-"):
            return super().resolve_command(ctx, args)
        if _is_file(word):
            example = f": {ctx.command_path} {self.for_files} {' '.join(args)}" if self.for_files else ""
            ctx.fail(f"{word} is not a command; write a command before files{example}")
        raise click.UsageError(f"No such command: {word}; {self._instead_of(word)}", ctx)

    def _instead_of(self, word: str) -> str:
        """Return the command that a word probably means, or all commands."""
        parts = [part for part in re.split("[-_]", word) if part in self.commands]
        near = parts or get_close_matches(word, self.commands)
        return f"did you mean {near[0]}?" if near else f"the commands are {', '.join(sorted(self.commands))}"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings, then the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with the first sentence of its help, which click would cut to one line."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(_LONGEST_SENTENCE))
                    for name, command in commands
                    if command
                ]
            )

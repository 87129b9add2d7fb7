"""Shared parts of the package's commands: error messages, and options."""

import errno
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import click

from neox_data.amounts import bytes_in_words
from neox_data.command_line import Command, Group
from neox_data.counted import counted
from neox_data.errors import DataError, IndexedDatasetError, TokenizerError
from neox_data.indexed.index import read_index
from neox_data.indexed.layout import idx_path
from neox_data.whole_files import NO_ROOM

__all__ = [
    "DataCommand",
    "DataCommands",
    "corpus_files_option",
    "jsonl_key_option",
    "log_interval_option",
    "notes_on_replaced",
    "one_option_per_word",
]

# Names of the tokenizer's parameters in a message, which are options of some commands; not parts of paths.
_PARAMETERS = re.compile(r"(?<!\S)(?:tokenizer_type|vocab_file|merge_file)(?=[\s;,]|$)")
_PREPROCESSING = ("preprocess", "preprocess-data", "preprocess_data", "preprocess_data.py")
_REMOVED = "incomplete files were removed"
_MAKE_ROOM = "free disk space or choose another location, and start again"

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


def notes_on_replaced(prefixes: Iterable[Path | str]) -> list[str]:
    """Return what is said after datasets have been written in place of others; called before that."""
    return [note for prefix in map(Path, prefixes) if (note := _note_on_replaced(prefix)) is not None]


def _note_on_replaced(prefix: Path) -> str | None:
    if not idx_path(prefix).exists():
        return None
    try:
        index = read_index(prefix)
    except (IndexedDatasetError, OSError):
        return f"replaced {prefix}, which was no complete dataset"
    documents = counted(len(index.document_starts) - 1, "document")
    return f"replaced a dataset of {documents} and {counted(index.num_tokens, 'token')}, {prefix}"


class DataCommand(Command):
    """A command of this package.

    Args:
        several: options that take several values, as with argparse: `--input a.jsonl b.jsonl`.
        advice: options of other programs -> what to write in place of each.
    """

    reported: ClassVar[tuple[type[Exception], ...]] = (DataError, OSError)

    def __init__(
        self,
        *args: Any,
        several: Iterable[str] = (),
        advice: Mapping[str, str] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._several = frozenset(several)
        self._advice = advice

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; answer files without `--input`, and options of other programs."""
        words = list(one_option_per_word(args, self._several))
        try:
            return super().parse_args(ctx, list(words))
        except click.NoSuchOption as error:
            advice = self._advice.get(error.option_name.replace("_", "-"))
            if advice is None:
                raise
            raise click.UsageError(f"No such option: {error.option_name}; {advice}.", ctx=ctx) from error
        except click.MissingParameter as error:
            if error.param is None or error.param.name != "inputs":
                raise
            files = self.make_parser(ctx).parse_args(words)[1]
            if not files:
                raise
            remedy = f"give the files with --input: --input {shlex.join(files)}"
            raise click.UsageError(f"Missing option '--input'; {remedy}", ctx=ctx) from error

    def message(self, error: Exception) -> str:
        """Return the sentence that reports an error."""
        text = super().message(error)
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            text = f"{text}; {_REMOVED}{_free_space(error)}; {_MAKE_ROOM}"
        return _PARAMETERS.sub(self._option, text) if isinstance(error, TokenizerError) else text

    def _option(self, found: re.Match[str]) -> str:
        """Return the option of this command for the name of a parameter, which it is without an option."""
        options = {option.name: option.opts[0] for option in self.params}
        return options.get(found[0], found[0])


def _free_space(error: OSError) -> str:
    """Return how much of a full disk is free now; empty for an error that names no file, and of a limit."""
    if not error.filename or error.errno != errno.ENOSPC:
        return ""
    path = Path(os.fsdecode(error.filename)).absolute()
    folder = next(each for each in path.parents if each.is_dir())
    return f", and {bytes_in_words(shutil.disk_usage(folder).free)} are free in {folder}"


class DataCommands(Group):
    """A program with such commands."""

    command_class = DataCommand

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names; name the program that is meant by preprocess."""
        if args[0] in _PREPROCESSING and not ctx.resilient_parsing:
            meant = shlex.join(["preprocess_data", *args[1:]])
            ctx.fail(f"{args[0]} is not a command of neox-data; it is a separate program: {meant}")
        return super().resolve_command(ctx, args)


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

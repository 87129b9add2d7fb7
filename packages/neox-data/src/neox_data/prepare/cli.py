"""The command `neox-data prepare`."""

from pathlib import Path

import click

from neox_data.command import (
    Command,
    jsonl_key_option,
    log_interval_option,
    more_files_argument,
    quiet_option,
)
from neox_data.prepare.run import RESULT
from neox_data.prepare.run import prepare as run
from neox_data.preprocess.inputs import ENDINGS
from neox_data.tokenizers.train import FEWEST_ENTRIES, MOST_ENTRIES

__all__ = ["prepare"]


@click.command(
    "prepare",
    cls=Command,
    exit_codes={3: "the folder contains the result of other texts or options"},
    examples=(
        "neox-data prepare --input texts --output run",
        "neox-data prepare --input a.jsonl b.parquet --jsonl-key content --vocab-size 16384 --output run",
    ),
)
@click.option(
    "--input",
    "inputs",
    required=True,
    multiple=True,
    metavar="PATH",
    help=f"Files and folders with texts: {ENDINGS}.",
)
@more_files_argument
@click.option(
    "--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to write to."
)
@jsonl_key_option
@click.option(
    "--vocab-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A tokenizer.json to use.  [default: train one]",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(FEWEST_ENTRIES, MOST_ENTRIES),
    help="Entries of the tokenizer that is trained.  [default: by the size of the corpus, 512 to 32,768]",
)
@log_interval_option
@quiet_option
def prepare(
    inputs: tuple[str, ...],
    more: tuple[str, ...],
    output: Path,
    jsonl_key: str,
    vocab_file: Path | None,
    vocab_size: int | None,
    log_interval: int,
    quiet: bool,
) -> None:
    """Make a tokenizer and a dataset from files and folders with texts.

    Writes corpus.jsonl (all documents, mixed), tokenizer.json, data/corpus_text_document.bin and .idx, and
    prepared.json (the counts, and a split for training and validation). Run it again after an interruption:
    steps that are complete are not repeated, and what is missing is written again.
    """
    if vocab_file is not None and vocab_size is not None:
        raise click.UsageError("--vocab-size is for a tokenizer that is trained; remove it, or --vocab-file")
    if "" in inputs:
        raise click.UsageError("--input is empty; give a path (. is the current folder)")
    run(
        [Path(name) for name in inputs + more],
        output,
        key=jsonl_key,
        vocab_file=vocab_file,
        vocab_size=vocab_size,
        log_interval=None if quiet else log_interval,
        say=click.echo,
    )
    click.echo(f"wrote {output / RESULT}")

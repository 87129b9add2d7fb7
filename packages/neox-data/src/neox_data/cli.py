"""`neox-data`: look at token files, check them, and make what comes before them."""

import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

from neox_data.analyze_cli import analyze
from neox_data.blend_report_cli import blend_report
from neox_data.command import CONTEXT_SETTINGS, DataCommand, ended_by_ctrl_c
from neox_data.indexed import IndexedDataset, open_indexed
from neox_data.indexed.chart import draw_lengths
from neox_data.indexed.edit import convert_indexed, merge_indexed, split_indexed
from neox_data.indexed.lengths import histogram_lines
from neox_data.indexed.verify import verify_indexed
from neox_data.manifest import (
    check_tokenizer,
    cut_manifest,
    merge_manifests,
    verify_manifest,
    write_manifest,
)
from neox_data.preprocess.inputs import find_inputs
from neox_data.preprocess.read import CorpusReader
from neox_data.preprocess.stdlib_corpus import write_stdlib_corpus
from neox_data.sources import cut_offsets, merge_offsets
from neox_data.tokenizers import TOKENIZERS, Tokenizer, build_tokenizer
from neox_data.tokenizers.train import train_byte_level_bpe
from neox_data.trace_cli import trace

__all__ = ["main"]

_SHOWN_TOKENS = 200


@click.group(context_settings=CONTEXT_SETTINGS)
def main() -> None:
    """Token files and what they are made of."""


@main.command(cls=DataCommand)
@click.argument("prefix")
@click.option("--png", type=click.Path(path_type=Path), help="Draw the lengths of the documents here.")
@click.option("--show", type=click.IntRange(0), default=0, help="Number of first documents to decode.")
@click.option("--tokenizer-type", type=click.Choice(list(TOKENIZERS)), help="What decodes them.")
@click.option("--vocab-file", type=click.Path(path_type=Path), help="Its vocabulary, or its only file.")
@click.option("--merge-file", type=click.Path(path_type=Path), help="The merges of GPT2BPETokenizer.")
def inspect(
    prefix: str,
    png: Path | None,
    show: int,
    tokenizer_type: str | None,
    vocab_file: Path | None,
    merge_file: Path | None,
) -> None:
    """Show what the dataset PREFIX.bin and PREFIX.idx holds: counts, lengths, and first documents."""
    if show and tokenizer_type is None:
        raise click.UsageError("--show needs --tokenizer-type, which decodes the documents")
    dataset = open_indexed(prefix)
    documents: list[str] = []
    if tokenizer_type is not None:
        tokenizer = build_tokenizer(tokenizer_type, vocab_file=vocab_file, merge_file=merge_file)
        check_tokenizer(prefix, tokenizer)
        documents = list(_first_documents(dataset, tokenizer, show))
    for name, value in _description(dataset):
        click.echo(f"{name:12} {value}")
    if len(dataset):
        click.echo(f"\n{'tokens':>29} {'documents':>15}")
    for line in histogram_lines(dataset.sizes):
        click.echo(line)
    if png is not None:
        draw_lengths(dataset.sizes, str(prefix), png)
        click.echo(f"\nwrote {png}")
    for document in documents:
        click.echo(f"\n{document}")


@main.command(cls=DataCommand)
@click.argument("prefix")
def verify(prefix: str) -> None:
    """Check every invariant of the dataset PREFIX.bin and PREFIX.idx, and its hashes against the manifest."""
    dataset = verify_indexed(prefix)
    hashes = "and the hashes" if verify_manifest(prefix) else "but no hash: there is no manifest"
    click.echo(
        f"{prefix}: {len(dataset):,} sequences, {dataset.num_tokens:,} tokens, all checks passed, {hashes}"
    )


@main.command(cls=DataCommand)
@click.argument("prefixes", nargs=-1, required=True, metavar="PREFIX...")
@click.option("--output", required=True, help="Prefix of the new dataset.")
def merge(prefixes: tuple[str, ...], output: str) -> None:
    """Write the documents of several datasets as one, in the order given; a pattern may name the .idx files.

    Tokens are copied once, by reference where the file system can do that.
    """
    prefixes = tuple(prefix.removesuffix(".idx") for prefix in prefixes)
    contents = merge_manifests(prefixes)
    dataset = merge_indexed(prefixes, output)
    if contents is None:
        click.echo("not every dataset has a manifest, so the new one has none", err=True)
    else:
        merge_offsets(prefixes, output)
        write_manifest(output, **contents)
    _echo_written(dataset)


@main.command(cls=DataCommand)
@click.argument("prefix")
@click.option("--split", required=True, help='Relative shares of train, valid and test, as in "969, 30, 1".')
@click.option("--output", required=True, help="The new datasets are OUTPUT_train, OUTPUT_valid, OUTPUT_test.")
def split(prefix: str, split: str, output: str) -> None:
    """Write the parts of a split, which training would make by itself, as datasets of their own."""
    for documents, dataset in split_indexed(prefix, split, output):
        if contents := cut_manifest(prefix, documents, dataset.num_tokens):
            cut_offsets(prefix, documents, dataset.prefix)
            write_manifest(dataset.prefix, **contents)
        _echo_written(dataset)


@main.command(cls=DataCommand)
@click.argument("prefix")
@click.option("--output", required=True, help="Prefix of the new dataset.")
def convert(prefix: str, output: str) -> None:
    """Write a dataset of the older `cached` or `lazy` layout in the mmap layout."""
    _echo_written(convert_indexed(prefix, output))


@main.command(cls=DataCommand, several=("--input",))
@click.option(
    "--input",
    "inputs",
    required=True,
    multiple=True,
    metavar="FILE...",
    help="Corpus files, as for preprocess_data.",
)
@click.option("--jsonl-key", default="text", help="Key of each JSON line to take.")
def count(inputs: tuple[str, ...], jsonl_key: str) -> None:
    """Count the documents of corpus files, and name the first that cannot be read."""
    reader = CorpusReader(find_inputs(inputs), (jsonl_key,), skip_bad_lines=True)
    documents = characters = num_bytes = empty = 0
    for document in reader:
        documents += 1
        characters += len(document.texts[0])
        num_bytes += len(document.texts[0].encode())
        empty += not document.texts[0]
    for name, value in (
        ("documents", documents),
        ("characters", characters),
        ("bytes", num_bytes),
        ("empty", empty),
        ("too long", reader.num_too_long),
        ("unreadable", reader.num_skipped),
    ):
        click.echo(f"{name:12} {value:,}")
    for reason in reader.first_skipped:
        click.echo(f"unreadable: {reason}", err=True)


@main.command("train-tokenizer", cls=DataCommand, several=("--input",))
@click.option(
    "--input",
    "inputs",
    required=True,
    multiple=True,
    metavar="FILE...",
    help="Corpus files, as for preprocess_data.",
)
@click.option("--jsonl-key", default="text", help="Key of each JSON line to take.")
@click.option(
    "--vocab-size", type=click.IntRange(1), default=8192, help="Entries, the two special tokens included."
)
@click.option(
    "--output", type=click.Path(path_type=Path), default="tokenizer.json", help="The file to write."
)
@click.option("--skip-bad-lines", is_flag=True, help="Leave out documents that cannot be read.")
def train_tokenizer(
    inputs: tuple[str, ...], jsonl_key: str, vocab_size: int, output: Path, skip_bad_lines: bool
) -> None:
    """Train a byte-level BPE vocabulary, for HFTokenizer."""
    started = time.monotonic()
    reader = CorpusReader(find_inputs(inputs), (jsonl_key,), skip_bad_lines=skip_bad_lines)
    texts = (document.texts[0] for document in reader)
    with ended_by_ctrl_c():
        entries = train_byte_level_bpe(texts, vocab_size=vocab_size, output=output)
    if entries < vocab_size:
        click.echo(f"the corpus gives only {entries:,} entries of the {vocab_size:,} asked for", err=True)
    if reader.num_skipped:
        click.echo(f"{reader.num_skipped:,} unreadable documents were skipped", err=True)
    seconds = time.monotonic() - started
    click.echo(
        f"wrote {output}: {entries:,} entries from {reader.total_bytes / 1e6:,.1f} MB in {seconds:.1f} s"
    )


@main.command("stdlib-corpus", cls=DataCommand)
@click.argument("output", type=click.Path(path_type=Path))
def stdlib_corpus(output: Path) -> None:
    """Write the source files of Python's standard library to OUTPUT, one JSON line each.

    They follow each other by a hash of their names, so any range of lines is a fair sample of all.
    """
    counts = write_stdlib_corpus(output)
    click.echo(f"wrote {output}: {counts.files:,} files, {counts.num_bytes / 1e6:,.1f} MB")
    if counts.undecodable:
        click.echo(f"{counts.undecodable:,} files are not UTF-8 and were left out")


main.add_command(trace)
main.add_command(analyze)
main.add_command(blend_report)


def _first_documents(dataset: IndexedDataset, tokenizer: Tokenizer, count: int) -> Iterator[str]:
    for number in range(min(count, len(dataset))):
        size = dataset.sizes.item(number)
        tokens = dataset.get(number, 0, min(_SHOWN_TOKENS, size))
        yield f"document {number}, {size:,} tokens:\n{tokenizer.decode(tokens.tolist())}"


def _echo_written(dataset: IndexedDataset) -> None:
    click.echo(
        f"wrote {dataset.prefix}.bin and {dataset.prefix}.idx: {len(dataset):,} sequences, "
        f"{dataset.num_tokens:,} tokens"
    )


def _description(dataset: IndexedDataset) -> list[tuple[str, str]]:
    sizes = dataset.sizes
    rows = [
        ("prefix", str(dataset.prefix)),
        ("layout", dataset.index.layout),
        ("token type", dataset.dtype.name),
        ("sequences", f"{len(dataset):,}"),
        ("documents", f"{max(len(dataset.document_starts) - 1, 0):,}"),
        ("tokens", f"{dataset.num_tokens:,}"),
    ]
    if len(sizes):
        rows.append(
            (
                "lengths",
                f"{sizes.min():,} to {sizes.max():,}, mean {sizes.mean():,.1f}, median "
                f"{np.median(sizes):,.0f}",
            )
        )
    return rows

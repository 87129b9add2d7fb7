"""`neox-data`: inspect, verify, convert and trace token files, and train tokenizers."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

from neox_data.amount_progress import Counts, Reporter, report_progress
from neox_data.amounts import bytes_in_words
from neox_data.analyze_cli import analyze
from neox_data.blend_report_cli import blend_report
from neox_data.command import (
    Group,
    corpus_files_option,
    jsonl_key_option,
    log_interval_option,
    more_files_argument,
    quiet_option,
)
from neox_data.indexed import IndexedDataset, open_indexed
from neox_data.indexed.edit import convert_indexed, merge_indexed, split_indexed
from neox_data.indexed.lengths import histogram_lines
from neox_data.indexed.verify import verify_indexed
from neox_data.manifest import (
    check_tokenizer,
    cut_manifest,
    merge_manifests,
    recorded_sha256,
    verify_manifest,
    write_manifest,
)
from neox_data.pluralize import pluralize
from neox_data.prepare.cli import prepare
from neox_data.preprocess.inputs import find_inputs
from neox_data.preprocess.passed_over import PassedOver
from neox_data.preprocess.read import CorpusReader
from neox_data.preprocess.stdlib_corpus import write_stdlib_corpus
from neox_data.sources import cut_offsets, merge_offsets
from neox_data.tokenizers import GPT_NEOX_NAMES, TOKENIZERS, Tokenizer, build_tokenizer
from neox_data.tokenizers.added import add_special_tokens
from neox_data.tokenizers.train import FEWEST_ENTRIES, MOST_ENTRIES, train_byte_level_bpe
from neox_data.trace_cli import trace

__all__ = ["main"]

_SHOWN_TOKENS = 200
_DOCUMENTS_PER_REPORT = 100


@click.group(
    cls=Group,
    examples=(
        "neox-data prepare --input texts --output run",
        "neox-data inspect run/data/corpus_text_document",
    ),
)
@click.version_option(package_name="neox-data")
def main() -> None:
    """Inspect, verify, convert and trace token files, and train tokenizers."""


@main.command(
    examples=(
        "neox-data inspect data/corpus_text_document",
        "neox-data inspect data/corpus --show 3 --tokenizer-type HFTokenizer --vocab-file tokenizer.json",
    )
)
@click.argument("prefix")
@click.option(
    "--show",
    type=click.IntRange(0),
    default=0,
    help="Number of documents to decode and print, from the first; of labels, the tokens that count.",
)
@click.option(
    "--tokenizer-type", type=click.Choice([*TOKENIZERS, *GPT_NEOX_NAMES]), help="Tokenizer for --show."
)
@click.option(
    "--vocab-file",
    type=click.Path(path_type=Path),
    help="The tokenizer's vocabulary, or its only file, such as tokenizer.json.",
)
@click.option("--merge-file", type=click.Path(path_type=Path), help="Merges file of GPT2BPETokenizer.")
def inspect(
    prefix: str,
    show: int,
    tokenizer_type: str | None,
    vocab_file: Path | None,
    merge_file: Path | None,
) -> None:
    """Show counts, document lengths and first documents of the dataset PREFIX.bin and PREFIX.idx."""
    if show and tokenizer_type is None:
        raise click.UsageError("--show requires a tokenizer; pass --tokenizer-type")
    dataset = open_indexed(prefix)
    documents: list[str] = []
    if tokenizer_type is not None:
        tokenizer = build_tokenizer(tokenizer_type, vocab_file=vocab_file, merge_file=merge_file)
        check_tokenizer(prefix, tokenizer)
        for number in range(min(show, len(dataset))):
            size = dataset.sizes.item(number)
            text = _decoded(dataset.get(number, 0, min(_SHOWN_TOKENS, size)), tokenizer)
            documents.append(f"document {number}, {size:,} tokens:\n{text}")
    sizes = dataset.sizes
    for name, value in (
        ("prefix", str(dataset.prefix)),
        ("layout", dataset.index.layout),
        ("token type", dataset.dtype.name),
        ("sequences", f"{len(dataset):,}"),
        ("documents", f"{max(len(dataset.document_starts) - 1, 0):,}"),
        ("tokens", f"{dataset.num_tokens:,}"),
    ):
        click.echo(f"{name:12} {value}")
    if len(dataset):
        click.echo(
            f"{'lengths':12} {sizes.min():,} to {sizes.max():,}, mean {sizes.mean():,.1f}, median "
            f"{np.median(sizes):,.0f}"
        )
        click.echo(f"\n{'tokens':>29} {'documents':>15}")
    for line in histogram_lines(sizes):
        click.echo(line)
    for document in documents:
        click.echo(f"\n{document}")


@main.command(
    examples=("neox-data verify data/corpus_text_document", "neox-data verify /mnt/data/books_text_document")
)
@click.argument("prefix")
def verify(prefix: str) -> None:
    """Check the dataset PREFIX.bin and PREFIX.idx for consistency, and its hashes against the manifest."""
    dataset = verify_indexed(prefix)
    hashes = "hashes match" if verify_manifest(prefix) else "hashes not checked (no manifest)"
    click.echo(
        f"{prefix}: {pluralize(len(dataset), 'sequence')}, {pluralize(dataset.num_tokens, 'token')}, all "
        f"checks passed, {hashes}"
    )


@main.command(
    examples=(
        "neox-data merge a_text_document b_text_document --output all_text_document",
        "neox-data merge parts/*.idx --output all_text_document",
    )
)
@click.argument("prefixes", nargs=-1, required=True, metavar="PREFIX...")
@click.option("--output", required=True, help="Prefix of the new dataset.")
def merge(prefixes: tuple[str, ...], output: str) -> None:
    """Merge datasets into one, in the given order. Names may end in .idx, so a pattern such as *.idx works.

    A dataset with a manifest is compared with it; if one is damaged, nothing is written. Tokens of others are
    copied by reference if the file system supports it.
    """
    prefixes = tuple(prefix.removesuffix(".idx") for prefix in prefixes)
    contents = merge_manifests(prefixes)
    for prefix in prefixes:
        verify_manifest(prefix, (".idx", ".offsets"))
    copied = merge_indexed(prefixes, output, hashes=[recorded_sha256(prefix, ".bin") for prefix in prefixes])
    if contents is None:
        click.echo("no manifest was written, because not every dataset has one", err=True)
    else:
        merge_offsets(prefixes, output)
        write_manifest(output, **contents, bin_sha256=copied.bin_sha256)
    _echo_written(copied.dataset)


@main.command(
    examples=(
        'neox-data split data/corpus_text_document --split "969, 30, 1" --output data/corpus',
        "neox-data split data/corpus_text_document --split 9,1,0 --output data/corpus",
    )
)
@click.argument("prefix")
@click.option("--split", required=True, help='Relative sizes of train, valid and test, such as "969, 30, 1".')
@click.option(
    "--output", required=True, help="Prefix of the new datasets OUTPUT_train, OUTPUT_valid and OUTPUT_test."
)
def split(prefix: str, split: str, output: str) -> None:
    """Write the train, valid and test parts of a dataset as separate datasets.

    A dataset with a manifest is compared with it; if it is damaged, nothing is written.
    """
    verify_manifest(prefix, (".idx", ".offsets"))
    for dataset, documents, sha256 in split_indexed(
        prefix, split, output, sha256=recorded_sha256(prefix, ".bin")
    ):
        if contents := cut_manifest(prefix, documents, dataset.num_tokens):
            cut_offsets(prefix, documents, dataset.prefix)
            write_manifest(dataset.prefix, **contents, bin_sha256=sha256)
        _echo_written(dataset)


@main.command(
    examples=(
        "neox-data convert old/corpus_text_document --output data/corpus_text_document",
        "neox-data convert /mnt/old/books --output books_text_document",
    )
)
@click.argument("prefix")
@click.option("--output", required=True, help="Prefix of the new dataset.")
def convert(prefix: str, output: str) -> None:
    """Convert a dataset from the older `cached` or `lazy` layout to the mmap layout."""
    verify_manifest(prefix)
    _echo_written(convert_indexed(prefix, output))


@main.command(
    examples=(
        "neox-data count --input texts/*.jsonl",
        "neox-data count --input books.jsonl.zst --jsonl-key content",
    ),
    exit_codes={1: "documents cannot be read (neox-launch init skips them), or a failure"},
)
@corpus_files_option
@more_files_argument
@jsonl_key_option
def count(inputs: tuple[str, ...], more: tuple[str, ...], jsonl_key: str) -> None:
    """Count the documents of corpus files. If some cannot be read, list the first of them."""
    passed_over = PassedOver()
    paths = find_inputs(inputs + more, passed_over)
    reader = CorpusReader(paths, (jsonl_key,), skip_bad_lines=True, passed_over=passed_over)
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
        ("null", reader.num_null),
    ):
        click.echo(f"{name:12} {value:,}")
    for reason in reader.first_skipped:
        click.echo(f"unreadable: {reason}", err=True)
    for line in passed_over.lines():
        click.echo(line, err=True)
    if reader.num_skipped:
        click.echo(
            f"Error: {pluralize(reader.num_skipped, 'document')} cannot be read; correct the files, or skip "
            "such documents: neox-launch init and neox-data prepare do, preprocess_data does with "
            "--skip-bad-lines",
            err=True,
        )
        click.get_current_context().exit(1)


def _checked_tokens(
    context: click.Context, parameter: click.Parameter, tokens: tuple[str, ...]
) -> tuple[str, ...]:
    if "" in tokens:
        raise click.UsageError("a special token is empty; give its text")
    # The command reports a token that is not UTF-8.
    "".join(tokens).encode()
    return tokens


@main.command(
    "train-tokenizer",
    examples=(
        "neox-data train-tokenizer --input texts/*.jsonl --vocab-size 32768",
        "neox-data train-tokenizer --input books.parquet --jsonl-key content --output books-tokenizer.json",
    ),
)
@corpus_files_option
@more_files_argument
@jsonl_key_option
@click.option(
    "--vocab-size",
    type=click.IntRange(FEWEST_ENTRIES, MOST_ENTRIES),
    default=8192,
    help="Vocabulary size, including the special tokens.",
)
@click.option(
    "--special-token",
    "special",
    multiple=True,
    metavar="TOKEN",
    callback=_checked_tokens,
    help='Another special token, such as "<|mask|>"; repeat the option for each.',
)
@click.option("--output", type=click.Path(path_type=Path), default="tokenizer.json", help="File to write.")
@click.option("--skip-bad-lines", is_flag=True, help="Skip documents that cannot be read.")
@log_interval_option
@quiet_option
def train_tokenizer(
    inputs: tuple[str, ...],
    more: tuple[str, ...],
    jsonl_key: str,
    vocab_size: int,
    special: tuple[str, ...],
    output: Path,
    skip_bad_lines: bool,
    log_interval: int,
    quiet: bool,
) -> None:
    """Train a byte-level BPE vocabulary, for HFTokenizer."""
    started = time.monotonic()
    passed_over = PassedOver()
    paths = find_inputs(inputs + more, passed_over)
    _refuse_existing_tokenizer(output)
    reader = CorpusReader(paths, (jsonl_key,), skip_bad_lines=skip_bad_lines, passed_over=passed_over)
    if not quiet:
        amount = bytes_in_words(reader.total_bytes)
        click.echo(f"reading {pluralize(len(paths), 'file')}, {amount}", err=True)
    with report_progress(log_interval=None if quiet else log_interval) as report:
        texts = _texts_with_progress(reader, report)
        entries = train_byte_level_bpe(texts, vocab_size=vocab_size, output=output, special=special)
    for line in passed_over.lines():
        click.echo(line, err=True)
    if entries < vocab_size:
        click.echo(f"the corpus yields only {entries:,} of the {vocab_size:,} requested entries", err=True)
    if reader.num_skipped:
        what = ("unreadable document was skipped", "unreadable documents were skipped")
        click.echo(pluralize(reader.num_skipped, *what), err=True)
    seconds = time.monotonic() - started
    click.echo(
        f"wrote {output}: {entries:,} entries from {bytes_in_words(reader.total_bytes)} in {seconds:.1f} s"
    )


@main.command(
    "add-tokens",
    examples=(
        'neox-data add-tokens tokenizer.json "<|mask|>" --output with-mask.json',
        'neox-data add-tokens old.json "<|fim_prefix|>" "<|fim_middle|>" "<|fim_suffix|>" --output new.json',
    ),
)
@click.argument("source", metavar="TOKENIZER.json", type=click.Path(path_type=Path))
@click.argument("tokens", metavar="TOKEN...", nargs=-1, required=True, callback=_checked_tokens)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="File to write.")
def add_tokens(source: Path, tokens: tuple[str, ...], output: Path) -> None:
    """Add special tokens behind the vocabulary of TOKENIZER.json; all other ids stay the same.

    Tokenize data with the new tokenizer: a dataset records the tokenizer it was made with.
    """
    _refuse_existing_tokenizer(output)
    added = add_special_tokens(source, tokens, output)
    for token, number in added.items():
        click.echo(f"{number:>8} {token}")
    click.echo(f"wrote {output}: {max(added.values()) + 1:,} entries")


def _refuse_existing_tokenizer(output: Path) -> None:
    """Refuse to overwrite a tokenizer: models and datasets made with it could not be used any more.

    Raises:
        UsageError: the file exists.
    """
    if os.path.lexists(output):
        raise click.UsageError(
            f"--output {output} exists, and models and datasets may require this tokenizer; give another "
            "--output, or delete the file first"
        )


@main.command(
    "stdlib-corpus",
    examples=("neox-data stdlib-corpus corpus.jsonl", "neox-data stdlib-corpus data/python.jsonl"),
)
@click.argument("output", type=click.Path(path_type=Path))
def stdlib_corpus(output: Path) -> None:
    """Write source files of Python's standard library to OUTPUT, one JSON line per file.

    The list of files is the same for every Python; tests and generated tables are not in it. They are
    ordered by a hash of their names, so any range of lines is a representative sample.
    """
    counts = write_stdlib_corpus(output)
    if counts.missing:
        click.echo(
            f"this Python does not have {len(counts.missing):,} of the files: {', '.join(counts.missing)}",
            err=True,
        )
    click.echo(f"wrote {output}: {pluralize(counts.files, 'file')}, {bytes_in_words(counts.num_bytes)}")
    click.echo(f"SHA-256 {counts.sha256}")


main.add_command(prepare)
main.add_command(trace)
main.add_command(analyze)
main.add_command(blend_report)


def _texts_with_progress(reader: CorpusReader, report: Reporter) -> Iterator[str]:
    """Yield the texts of a corpus, and report how much of it has been read."""
    started, counts = time.monotonic(), Counts()
    for document in reader:
        counts.documents += 1
        counts.num_bytes += document.num_bytes
        if not counts.documents % _DOCUMENTS_PER_REPORT:
            counts.seconds = time.monotonic() - started
            counts.fraction = reader.bytes_done / max(reader.total_bytes, 1)
            report(counts)
        yield document.texts[0]
    click.echo(f"learning a vocabulary from {pluralize(counts.documents, 'document')}", err=True)


def _decoded(tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    """Decode ids; of labels, those below 0, which the loss leaves out, are counted in brackets."""
    runs = np.split(tokens, np.flatnonzero(np.diff(tokens < 0)) + 1)
    return "".join(
        f"[{pluralize(len(run), 'token')} left out]" if run[0] < 0 else tokenizer.decode(run.tolist())
        for run in runs
        if len(run)
    )


def _echo_written(dataset: IndexedDataset) -> None:
    click.echo(
        f"wrote {dataset.prefix}.bin and {dataset.prefix}.idx: {pluralize(len(dataset), 'sequence')}, "
        f"{pluralize(dataset.num_tokens, 'token')}"
    )

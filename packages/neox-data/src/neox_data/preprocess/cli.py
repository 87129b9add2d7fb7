"""`preprocess_data`: text files -> indexed datasets, with GPT-NeoX's options."""

import os
import sys
from pathlib import Path

import click

from neox_data.command import CONTEXT_SETTINGS, DataCommand
from neox_data.preprocess.inputs import find_inputs
from neox_data.preprocess.progress import report_progress
from neox_data.preprocess.read import MAX_DOCUMENT_BYTES
from neox_data.preprocess.run import Options, preprocess
from neox_data.preprocess.shards import preprocess_resumably, take_shard
from neox_data.tokenizers import TOKENIZERS, build_tokenizer

__all__ = ["main"]


@click.command(
    "preprocess_data",
    cls=DataCommand,
    several=("--input", "--jsonl-keys"),
    context_settings=CONTEXT_SETTINGS,
)
@click.option(
    "--input",
    "inputs",
    required=True,
    multiple=True,
    metavar="FILE...",
    help="Corpus files (.jsonl, .txt, .parquet; .gz, .zst, .tar) or folders of them; several, "
    "a quoted pattern, or names between commas.",
)
@click.option(
    "--jsonl-keys",
    "keys",
    multiple=True,
    default=("text",),
    metavar="KEY...",
    help="Keys of each JSON line to take; each becomes a dataset.",
)
@click.option(
    "--num-docs", type=click.IntRange(1), help="Number of documents, for the progress; else judged by bytes."
)
@click.option(
    "--tokenizer-type", required=True, type=click.Choice(list(TOKENIZERS)), help="The kind of tokenizer."
)
@click.option(
    "--vocab-file", type=click.Path(path_type=Path), help="The tokenizer's vocabulary, or its only file."
)
@click.option("--merge-file", type=click.Path(path_type=Path), help="The merges of GPT2BPETokenizer.")
@click.option("--append-eod", is_flag=True, help="End each document with the end-of-document token.")
@click.option(
    "--output-prefix",
    required=True,
    help="Datasets are PREFIX_KEY_document.",
)
@click.option("--dataset-impl", type=click.Choice(["mmap"]), default="mmap", help="The layout to write.")
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Threads that encode; the output is the same for any number.  [default: all cores]",
)
@click.option(
    "--log-interval",
    type=click.IntRange(1),
    default=10_000,
    help="Documents between lines when not on a terminal.",
)
@click.option("--skip-bad-lines", is_flag=True, help="Count documents that cannot be read and go on.")
@click.option("--exact", is_flag=True, help="Encode with the tokenizers library, never with gigatoken.")
@click.option(
    "--max-document-bytes",
    type=click.IntRange(1),
    default=MAX_DOCUMENT_BYTES,
    help="Larger documents are counted and left out.",
)
@click.option(
    "--split-long-documents",
    is_flag=True,
    help="Cut them, at the end of a line where there is one, into documents that are small enough.",
)
@click.option("--ftfy", is_flag=True, help="Repair wrongly decoded characters with ftfy.")
@click.option(
    "--resume",
    is_flag=True,
    help="Work in shards of files, and leave out those that an earlier run with this flag had finished.",
)
@click.option("--shard", metavar="I/N", help="Take only the I-th of N parts of the files, as in 2/8.")
def main(
    inputs: tuple[str, ...],
    keys: tuple[str, ...],
    num_docs: int | None,
    tokenizer_type: str,
    vocab_file: Path | None,
    merge_file: Path | None,
    append_eod: bool,
    output_prefix: str,
    dataset_impl: str,
    workers: int | None,
    log_interval: int,
    skip_bad_lines: bool,
    exact: bool,
    max_document_bytes: int,
    split_long_documents: bool,
    ftfy: bool,
    resume: bool,
    shard: str | None,
) -> None:
    """Turn text files into token files for training: PREFIX_KEY_document.bin and .idx."""
    if not output_prefix or output_prefix.endswith("/"):
        raise click.UsageError(f"--output-prefix {output_prefix!r} names no file; end it with a name")
    workers = workers or len(os.sched_getaffinity(0))
    # Threads that read, encode and hash wait for each other many times a batch; by default each wait is ten
    # times as long.
    sys.setswitchinterval(0.0005)
    # The library starts its threads at the first batch, as many as this says.
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    paths = find_inputs(inputs)
    if shard is not None:
        paths, ending = take_shard(paths, shard)
        output_prefix += ending
    options = Options(
        keys=tuple(dict.fromkeys(keys)),
        append_end=append_eod,
        workers=workers,
        num_documents=num_docs,
        skip_bad_lines=skip_bad_lines,
        exact=exact,
        max_document_bytes=max_document_bytes,
        split_long=split_long_documents,
        mend_text=ftfy,
    )
    tokenizer = build_tokenizer(tokenizer_type, vocab_file=vocab_file, merge_file=merge_file)
    run = preprocess_resumably if resume else preprocess
    with report_progress(log_interval=log_interval) as report:
        summary = run(paths, output_prefix=output_prefix, tokenizer=tokenizer, options=options, report=report)
    for line in summary.lines():
        click.echo(line)

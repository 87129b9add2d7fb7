"""`neox-data trace`: find the documents that a run reads, and when it reads them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from cloup import OptionGroup, option, option_group

from neox_data.amount_progress import report_search
from neox_data.command import Command, quiet_option, verbose_option
from neox_data.errors import DataError
from neox_data.indexed.base import IndexedDataset
from neox_data.pluralize import pluralize
from neox_data.search import documents_with
from neox_data.sources import DocumentSources
from neox_data.tokenizers.base import Tokenizer
from neox_data.trace import (
    Passage,
    Reading,
    indexed_datasets,
    items_with,
    reading_of,
    readings_at,
)
from neox_data.training_data import BatchPlace, TrainingData, load_training_data

__all__ = ["config_options", "trace"]

_SHOWN_TOKENS = 60
_SOUGHT, _OUTPUT = OptionGroup("What to look for"), OptionGroup("Output")


def config_options(*others: Callable[[Any], Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options for the configuration and the number of devices, and others under the same heading."""
    return option_group(
        "Training",
        option(
            "--config",
            "paths",
            multiple=True,
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Configuration file of the run. May be repeated; the files are merged.",
        ),
        option(
            "--set",
            "overrides",
            multiple=True,
            metavar="NAME=VALUE",
            help="Override a parameter of the configuration. May be repeated; the last value wins.",
        ),
        option(
            "--devices",
            type=click.IntRange(1),
            help="Number of devices of the job.  [default: the smallest possible]",
        ),
        *others,
    )


@click.command(
    cls=Command,
    examples=(
        "neox-data trace --config small.yml --iteration 100",
        'neox-data trace --config small.yml --text "a sentence of the corpus" --checkpoint checkpoints',
    ),
    exit_codes={1: "no document contains the text, or a failure"},
)
@config_options(
    option(
        "--checkpoint",
        metavar="FOLDER|ITERATION",
        help="Checkpoint whose recorded batch sizes and left-out batches to use: its folder, or its "
        "iteration in save or load.  [default: the configuration's batch size in every iteration]",
    )
)
@option(
    "--iteration",
    group=_SOUGHT,
    type=click.IntRange(0),
    help="Show the documents of this iteration, counted from 0: iteration 1 of a run's log is 0.",
)
@option("--rank", group=_SOUGHT, type=click.IntRange(0), help="Show only the documents that this rank reads.")
@option("--document", group=_SOUGHT, metavar="[PREFIX:]NUMBER", help="Show when this document is read.")
@option(
    "--text", group=_SOUGHT, help="Find the documents that contain this text, and show when they are read."
)
@option(
    "--show",
    group=_OUTPUT,
    type=click.IntRange(0),
    default=_SHOWN_TOKENS,
    help="Number of tokens to print per passage.",
)
@verbose_option
@quiet_option
def trace(
    paths: tuple[Path, ...],
    overrides: tuple[str, ...],
    devices: int | None,
    checkpoint: str | None,
    iteration: int | None,
    rank: int | None,
    document: str | None,
    text: str | None,
    show: int,
    quiet: bool,
) -> None:
    """Show the documents that an iteration reads, or when a document is read.

    This command counts iterations from 0; a run's log, errors and checkpoints count them from 1.
    Iteration N of a log is iteration N - 1 here.

    Nothing is trained: the result follows from the order of the samples, for any number of --devices. If the
    run was resumed with another batch size, or left out batches after loss spikes (on-spike: rollback),
    pass a --checkpoint, which records both.
    Otherwise the configuration's batch size is assumed for every iteration.
    """
    asked = {"--iteration": iteration, "--document": document, "--text": text}
    if not paths or sum(value is not None for value in asked.values()) != 1:
        raise click.UsageError(f"pass --config FILE and one of {', '.join(asked)}")
    if text == "":
        raise click.UsageError("--text is empty; pass the text to find")
    if rank is not None and iteration is None:
        raise click.UsageError("--rank is valid only with --iteration; pass --iteration")
    data = load_training_data(paths, overrides=overrides, devices=devices, checkpoint=checkpoint)
    report = _Report(data, show, is_quiet=quiet)
    if iteration is not None:
        lines = report.iteration(iteration, rank)
    elif document is not None:
        lines = report.document(*_find_document(data, document))
    else:
        assert text is not None
        lines = report.text(text)
    for line in lines:
        click.echo(line)
    if text is not None and not report.num_found:
        click.echo(
            "Error: no document contains this text; check its spelling, spaces and line breaks, and that "
            "these are the datasets of the run",
            err=True,
        )
        click.get_current_context().exit(1)


def _find_document(data: TrainingData, name: str) -> tuple[IndexedDataset, int]:
    found = _all_indexed(data)
    prefix, _, number = name.rpartition(":")
    if not number.isdecimal():
        raise click.UsageError(f"--document {name!r} is not a number; write it as NUMBER or PREFIX:NUMBER")
    if not prefix and len(found) > 1:
        choices = ", ".join(f"{one}:{number}" for one in found)
        raise click.UsageError(f"the configuration has several datasets; pass --document as one of {choices}")
    if prefix and prefix not in found:
        raise DataError(f"{prefix} is not a dataset of this configuration; pass one of {', '.join(found)}")
    indexed = found[prefix] if prefix else next(iter(found.values()))
    if int(number) >= len(indexed):
        raise DataError(
            f"{indexed.prefix} has no document {number}; pass a number from 0 to {len(indexed) - 1:,}"
        )
    return indexed, int(number)


def _all_indexed(data: TrainingData) -> dict[str, IndexedDataset]:
    return {
        str(indexed.prefix): indexed
        for dataset in data.datasets.values()
        for indexed in indexed_datasets(dataset)
    }


class _Report:
    """Formats the results as lines."""

    def __init__(self, data: TrainingData, show: int, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._data = data
        self._show = show
        self._tokenizer: Tokenizer = data.build_tokenizer()
        self._sources: dict[str, DocumentSources] = {}
        self.num_found = 0
        """Number of documents that contain the text."""

    def iteration(self, iteration: int, rank: int | None) -> Iterator[str]:
        for reading in readings_at(self._data, iteration, rank):
            yield f"{self._where(reading.place)}, item {reading.item:,} of train"
            yield from self._passages(reading)

    def document(self, indexed: IndexedDataset, document: int) -> Iterator[str]:
        yield self._described(indexed, document)
        for part in self._data.datasets:
            items = items_with(self._data, part, indexed, document)
            if part == "train":
                yield from self._times(items, indexed, document)
            elif items:
                samples = pluralize(len(items), "sample")
                yield f"  read by {samples} of the part {part}, which is not used for training"

    def text(self, text: str) -> Iterator[str]:
        datasets = _all_indexed(self._data).values()
        with report_search(
            sum(indexed.num_tokens for indexed in datasets), is_quiet=self._is_quiet
        ) as report:
            for indexed in datasets:
                for document in documents_with(indexed, text, self._tokenizer, report=report):
                    self.num_found += 1
                    yield from self.document(indexed, document)
        yield f"{pluralize(self.num_found, 'document contains', 'documents contain')} this text"

    def _times(self, items: list[int], indexed: IndexedDataset, document: int) -> Iterator[str]:
        """Yield when each item is read; a curriculum may truncate the item before the document."""
        readings = (reading_of(self._data, item) for item in items)
        lines = [
            f"  {self._where(reading.place)}: {_tokens_of(passage)}"
            for reading in readings
            for passage in reading.passages
            if (passage.document, passage.indexed.prefix) == (document, indexed.prefix)
        ]
        yield from lines or [f"  not read in {pluralize(self._data.train_iters, 'iteration')}"]

    def _passages(self, reading: Reading) -> Iterator[str]:
        for passage in reading.passages:
            yield f"  {self._described(passage.indexed, passage.document)}: {_tokens_of(passage)}"
            if self._show:
                shown = self._tokenizer.decode(passage.cut(self._show).tokens.tolist())
                yield from (f"    | {line}" for line in shown.splitlines())

    def _where(self, place: BatchPlace) -> str:
        left_out = " (not trained on: left out by a rollback)" * self._data.leaves_out(place.iteration)
        if place.data_parallel_rank is None:
            return f"iteration {place.iteration:,}, sample {place.row}{left_out}"
        return (
            f"iteration {place.iteration:,}, data-parallel rank {place.data_parallel_rank}, "
            f"micro-batch {place.micro_step}, sample {place.row}{left_out}"
        )

    def _described(self, indexed: IndexedDataset, document: int) -> str:
        prefix = str(indexed.prefix)
        sources = self._sources.setdefault(prefix, DocumentSources(prefix))
        source = sources.source_of(document)
        origin = "" if source is None else f" from {source}"
        return f"{prefix} document {document:,}{origin}"


def _tokens_of(passage: Passage) -> str:
    size = passage.indexed.sizes.item(passage.document)
    last = passage.offset + passage.length - 1
    return f"tokens {passage.offset:,} to {last:,} of {size:,}"

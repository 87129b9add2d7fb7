"""`neox-data trace`: which documents a training reads, and when."""

from collections.abc import Callable, Iterator
from pathlib import Path

import click

from neox_data.command import DataCommand
from neox_data.errors import DataError
from neox_data.indexed.base import IndexedDataset
from neox_data.search import documents_with
from neox_data.search_progress import report_search
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


def config_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that name a configuration and the devices that it is for."""
    for option in (
        click.option(
            "--devices", type=click.IntRange(1), help="Of the whole job.  [default: the fewest possible]"
        ),
        click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="Set one parameter."),
        click.option(
            "--config",
            "paths",
            multiple=True,
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="The configuration of the training; several files are merged.",
        ),
    ):
        command = option(command)
    return command


@click.command(cls=DataCommand)
@config_options
@click.option("--iteration", type=click.IntRange(0), help="Show the documents of this iteration, from 0.")
@click.option("--rank", type=click.IntRange(0), help="Of that iteration, only what this process reads.")
@click.option("--document", metavar="[PREFIX:]NUMBER", help="Tell when this document is read.")
@click.option("--text", help="Find the documents that hold this passage, and tell when they are read.")
@click.option(
    "--show", type=click.IntRange(0), default=_SHOWN_TOKENS, help="Tokens of each passage to show as text."
)
def trace(
    paths: tuple[Path, ...],
    overrides: tuple[str, ...],
    devices: int | None,
    iteration: int | None,
    rank: int | None,
    document: str | None,
    text: str | None,
    show: int,
) -> None:
    """Show the documents that an iteration reads, or when a document is read.

    Nothing is trained: the answer comes from the orders alone, for any number of --devices. It is that of a
    training that has had this configuration's batch size from its first iteration.
    """
    asked = {"--iteration": iteration, "--document": document, "--text": text}
    if not paths or sum(value is not None for value in asked.values()) != 1:
        raise click.UsageError(f"give --config FILE, and one of {', '.join(asked)}")
    if text is not None:
        _check_passage(text)
    if rank is not None and iteration is None:
        raise click.UsageError("--rank goes with --iteration")
    data = load_training_data(paths, overrides=overrides, devices=devices)
    teller = _Teller(data, show)
    if iteration is not None:
        lines = teller.iteration(iteration, rank)
    elif document is not None:
        lines = teller.document(*_find_document(data, document))
    else:
        assert text is not None
        lines = teller.text(text)
    for line in lines:
        click.echo(line)


def _check_passage(text: str) -> None:
    if not text:
        raise click.UsageError("--text is empty, and every document holds that; give a passage")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise click.UsageError(f"--text is not UTF-8 at character {error.start + 1}; correct it") from None


def _find_document(data: TrainingData, name: str) -> tuple[IndexedDataset, int]:
    found = _all_indexed(data)
    prefix, _, number = name.rpartition(":")
    if not number.isdecimal():
        raise click.UsageError(f"--document {name!r} is not a number, or a prefix, a colon and a number")
    if not prefix and len(found) > 1:
        raise click.UsageError(f"say of which dataset: {', '.join(f'{one}:{number}' for one in found)}")
    if prefix and prefix not in found:
        raise DataError(f"{prefix} is not data of this configuration; it reads {', '.join(found)}")
    indexed = found[prefix] if prefix else next(iter(found.values()))
    if int(number) >= len(indexed):
        raise DataError(f"{indexed.prefix} has documents 0 to {len(indexed) - 1:,}, and {number} is none")
    return indexed, int(number)


def _all_indexed(data: TrainingData) -> dict[str, IndexedDataset]:
    return {
        str(indexed.prefix): indexed
        for dataset in data.datasets.values()
        for indexed in indexed_datasets(dataset)
    }


class _Teller:
    """Answers as lines for a reader."""

    def __init__(self, data: TrainingData, show: int) -> None:
        self._data = data
        self._show = show
        self._tokenizer: Tokenizer = data.build_tokenizer()
        self._sources: dict[str, DocumentSources] = {}

    def iteration(self, iteration: int, rank: int | None) -> Iterator[str]:
        for reading in readings_at(self._data, iteration, rank):
            yield f"{_where(reading.place)}, item {reading.item:,} of train"
            yield from self._passages(reading)

    def document(self, indexed: IndexedDataset, document: int) -> Iterator[str]:
        yield self._described(indexed, document)
        for part in self._data.datasets:
            items = items_with(self._data, part, indexed, document)
            if part == "train":
                yield from self._times(items, indexed, document)
            elif items:
                yield f"  read by {len(items):,} samples of the part {part}, which is not trained on"

    def text(self, text: str) -> Iterator[str]:
        count, datasets = 0, _all_indexed(self._data).values()
        with report_search(sum(indexed.num_tokens for indexed in datasets)) as report:
            for indexed in datasets:
                for document in documents_with(indexed, text, self._tokenizer, report=report):
                    count += 1
                    yield from self.document(indexed, document)
        yield f"{count:,} documents hold this text"

    def _times(self, items: list[int], indexed: IndexedDataset, document: int) -> Iterator[str]:
        """When each item is trained on; a curriculum may cut the document off it."""
        readings = (reading_of(self._data, item) for item in items)
        lines = [
            f"  {_where(reading.place)}: {_tokens_of(passage)}"
            for reading in readings
            for passage in reading.passages
            if (passage.document, passage.indexed.prefix) == (document, indexed.prefix)
        ]
        yield from lines or [f"  not trained on in these {self._data.train_iters:,} iterations"]

    def _passages(self, reading: Reading) -> Iterator[str]:
        for passage in reading.passages:
            yield f"  {self._described(passage.indexed, passage.document)}: {_tokens_of(passage)}"
            if self._show:
                shown = self._tokenizer.decode(passage.cut(self._show).tokens.tolist())
                yield from (f"    | {line}" for line in shown.splitlines())

    def _described(self, indexed: IndexedDataset, document: int) -> str:
        prefix = str(indexed.prefix)
        sources = self._sources.setdefault(prefix, DocumentSources(prefix))
        source = sources.source_of(document)
        origin = "" if source is None else f" from {source}"
        return f"{prefix} document {document:,}{origin}"


def _where(place: BatchPlace) -> str:
    return (
        f"iteration {place.iteration:,}, data-parallel rank {place.data_parallel_rank}, "
        f"micro-batch {place.micro_step}, sample {place.row}"
    )


def _tokens_of(passage: Passage) -> str:
    size = passage.indexed.sizes.item(passage.document)
    last = passage.offset + passage.length - 1
    return f"tokens {passage.offset:,} to {last:,} of {size:,}"

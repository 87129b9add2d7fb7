"""`neox-data analyze`: measure the difficulty of a run's samples, for its curriculum."""

from pathlib import Path

import click

from neox_data.command import Command, verbose_option
from neox_data.curriculum.analyze import METRICS
from neox_data.curriculum.metric_index import write_metric_index
from neox_data.curriculum.sample_order import fingerprint_order
from neox_data.errors import DataError
from neox_data.pluralize import pluralize
from neox_data.trace_cli import config_options
from neox_data.training_data import load_training_data

__all__ = ["analyze"]

# Samples are numbered as without a curriculum.
_WITHOUT_CURRICULUM = "data_efficiency.enabled=false"


@click.command(
    cls=Command,
    examples=(
        "neox-data analyze --config small.yml --metric vocabularyrarity --output analysis",
        "neox-data analyze --config small.yml --config data.yml --metric documents --output analysis",
    ),
)
@config_options()
@verbose_option
@click.option("--metric", required=True, type=click.Choice(list(METRICS)), help="Measure of difficulty.")
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), help="Folder for the analysis files."
)
def analyze(
    paths: tuple[Path, ...], overrides: tuple[str, ...], devices: int | None, metric: str, output: Path
) -> None:
    """Measure the difficulty of the training samples of --config, and write the files for a curriculum.

    vocabularyrarity: minus the mean logarithm (base 2) of the tokens' frequencies, in thousandths.
    documents: number of documents in a sample.
    """
    if not paths:
        raise click.UsageError("no configuration was given; pass --config FILE")
    data = load_training_data(paths, overrides=[*overrides, _WITHOUT_CURRICULUM], devices=devices)
    if "train" not in data.datasets:
        raise DataError("this configuration has no training data; set data-path or train-data-paths")
    dataset = data.datasets["train"]
    values = METRICS[metric](dataset, len(dataset))
    prefixes = write_metric_index(output, metric, values, fingerprint_order(dataset))
    click.echo(f"{pluralize(len(values), 'sample')}, {metric} from {values.min():,} to {values.max():,}")
    click.echo(f"index_to_sample_path: {prefixes['index_to_sample']}")
    click.echo(f"index_to_metric_path: {prefixes['index_to_metric']}")
    merged = prefixes["index_to_sample_percentile_merged"]
    click.echo(f"index_to_sample_path for percentiles (fewer rows): {merged}")

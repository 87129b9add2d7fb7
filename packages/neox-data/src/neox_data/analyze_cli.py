"""`neox-data analyze`: how difficult the samples of a training are, for its curriculum."""

from pathlib import Path

import click

from neox_data.command import DataCommand
from neox_data.curriculum.analyze import METRICS
from neox_data.curriculum.metric_index import write_metric_index
from neox_data.errors import DataError
from neox_data.trace_cli import config_options
from neox_data.training_data import load_training_data

__all__ = ["analyze"]

# Samples are numbered as they are before a curriculum chooses among them.
_WITHOUT_CURRICULUM = "data_efficiency.enabled=false"


@click.command(cls=DataCommand)
@config_options
@click.option("--metric", required=True, type=click.Choice(list(METRICS)), help="The measure of difficulty.")
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), help="Folder for the files of the analysis."
)
def analyze(
    paths: tuple[Path, ...], overrides: tuple[str, ...], devices: int | None, metric: str, output: Path
) -> None:
    """Measure the training samples of --config, and write the files that a curriculum chooses by.

    vocabularyrarity: minus the mean logarithm (base 2) of the tokens' frequencies, in thousandths.
    documents: how many documents a sample is made of.
    """
    if not paths:
        raise click.UsageError("give --config FILE")
    data = load_training_data(paths, overrides=[*overrides, _WITHOUT_CURRICULUM], devices=devices)
    if "train" not in data.datasets:
        raise DataError("this configuration has no training data; set data-path or train-data-paths")
    dataset = data.datasets["train"]
    values = METRICS[metric](dataset, len(dataset))
    prefixes = write_metric_index(output, metric, values)
    click.echo(f"{len(values):,} samples, {metric} from {values.min():,} to {values.max():,}")
    click.echo(f"index_to_sample_path: {prefixes['index_to_sample']}")
    click.echo(f"index_to_metric_path: {prefixes['index_to_metric']}")
    merged = prefixes["index_to_sample_percentile_merged"]
    click.echo(f"index_to_sample_path for percentiles, in fewer rows: {merged}")

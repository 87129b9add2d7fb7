"""`neox-data blend-report`: report how many samples a run reads from each dataset."""

from pathlib import Path

import click

from neox_data.blend_report import report_datasets, share_lines
from neox_data.command import Command, verbose_option
from neox_data.curriculum.dataset import CurriculumDataset
from neox_data.pluralize import pluralize
from neox_data.trace_cli import config_options
from neox_data.training_data import load_training_data

__all__ = ["blend_report"]


@click.command(
    "blend-report",
    cls=Command,
    examples=(
        "neox-data blend-report --config small.yml",
        "neox-data blend-report --config small.yml --config data.yml",
    ),
)
@config_options()
@verbose_option
def blend_report(paths: tuple[Path, ...], overrides: tuple[str, ...], devices: int | None) -> None:
    """Show the share, samples and epochs that the run of --config reads from each dataset."""
    if not paths:
        raise click.UsageError("no configuration was given; pass --config FILE")
    data = load_training_data(paths, overrides=overrides, devices=devices)
    for part, dataset in data.datasets.items():
        chosen = ", before selection by the curriculum" if isinstance(dataset, CurriculumDataset) else ""
        click.echo(
            f"{part}: {pluralize(data.num_samples[part], 'sample')} of {data.seq_length:,} tokens{chosen}"
        )
        for line in share_lines(report_datasets(dataset, data.num_samples[part])):
            click.echo(line)

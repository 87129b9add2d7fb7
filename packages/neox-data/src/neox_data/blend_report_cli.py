"""`neox-data blend-report`: report how many samples a run reads from each dataset."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from neox_data.blend_report import SourceShare, report_blend, report_datasets, share_lines
from neox_data.command import Command, verbose_option
from neox_data.curriculum.dataset import CurriculumDataset
from neox_data.indexed import open_indexed
from neox_data.pluralize import pluralize
from neox_data.trace_cli import config_options
from neox_data.training_data import load_training_data
from neox_data.weights import weights_by_num_documents

__all__ = ["blend_report"]

# The order of a blend has an entry in memory for every sample.
_MOST_SAMPLES = 2**32


@click.command(
    "blend-report",
    cls=Command,
    examples=(
        "neox-data blend-report --config small.yml",
        'neox-data blend-report books web --weights "0.3, 0.7" --num-samples 100000 --seq-length 2048',
    ),
)
@click.argument("prefixes", nargs=-1, metavar="[PREFIX...]")
@config_options()
@verbose_option
@click.option(
    "--num-samples",
    type=click.IntRange(1, _MOST_SAMPLES),
    help="Number of samples: train_iters times train_batch_size.",
)
@click.option("--seq-length", type=click.IntRange(1), help="Tokens per sample.")
@click.option("--weights", help="Comma-separated relative weights, one per dataset.  [default: equal]")
@click.option(
    "--alpha",
    type=click.FloatRange(0),
    help="Exponent for weights by number of documents, like weighted_sampler_alpha.",
)
def blend_report(
    prefixes: tuple[str, ...],
    paths: tuple[Path, ...],
    overrides: tuple[str, ...],
    devices: int | None,
    **plain: Any,
) -> None:
    """Show the share, samples and epochs that a run reads from each dataset.

    Give either --config, or the prefixes of datasets with --num-samples and --seq-length.
    """
    if bool(paths) == bool(prefixes):
        raise click.UsageError("give either --config FILE or the prefixes of datasets")
    if prefixes:
        for line in share_lines(_report_prefixes(prefixes, **plain)):
            click.echo(line)
        return
    if given := [name for name, value in plain.items() if value is not None]:
        raise click.UsageError(
            f"--{given[0].replace('_', '-')} is valid only with prefixes; set it in the configuration instead"
        )
    data = load_training_data(paths, overrides=overrides, devices=devices)
    for part, dataset in data.datasets.items():
        chosen = ", before selection by the curriculum" if isinstance(dataset, CurriculumDataset) else ""
        click.echo(
            f"{part}: {pluralize(data.num_samples[part], 'sample')} of {data.seq_length:,} tokens{chosen}"
        )
        for line in share_lines(report_datasets(dataset, data.num_samples[part])):
            click.echo(line)


def _report_prefixes(
    prefixes: Sequence[str],
    *,
    num_samples: int | None,
    seq_length: int | None,
    weights: str | None,
    alpha: float | None,
) -> list[SourceShare]:
    if num_samples is None or seq_length is None:
        raise click.UsageError("prefixes require --num-samples and --seq-length; pass both")
    if weights is not None and alpha is not None:
        raise click.UsageError("--weights and --alpha are mutually exclusive; pass one of them")
    datasets = [open_indexed(prefix) for prefix in prefixes]
    try:
        shares = None if weights is None else [float(word) for word in weights.split(",")]
    except ValueError:
        raise click.UsageError(
            f'--weights {weights!r} is not a list of numbers; write it like "0.7, 0.3"'
        ) from None
    if alpha is not None:
        shares = weights_by_num_documents([len(dataset) for dataset in datasets], alpha).tolist()
    return report_blend(datasets, shares, num_samples=num_samples, seq_length=seq_length)

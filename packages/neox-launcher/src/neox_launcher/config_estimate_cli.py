"""`neox-config estimate` and `neox-config suggest`: what a training costs, and how to run it faster."""

import re
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from neox_launcher.config import NeoXConfig, Resolved, load_config, resolve
from neox_launcher.config.elasticity import without_elasticity
from neox_launcher.config.estimate import Estimate, estimate
from neox_launcher.config.shapes import (
    USUAL_VOCABULARY,
    fewest_devices,
    layout_of,
    read_vocabulary_size,
    shape_of,
)
from neox_launcher.config.suggest import ATTAINED_TFLOPS, Cluster, suggest
from neox_launcher.config_cluster import cluster_options, resolve_for
from neox_launcher.errors import NeoXError
from neox_launcher.estimate_tables import render_estimate, render_suggestions, render_training_time

__all__ = ["estimate_resolved", "parse_bytes", "register"]

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def _read_bytes(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from error


def parse_bytes(text: str) -> int:
    """Bytes of a size as people write it: `80GiB`, `80 GB`, `512MiB`.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is no size of memory; write it as 80GiB, 40GB or 512MiB")
    return round(float(found[1]) * _UNITS[found[2].upper()])


def register(group: click.Group) -> None:
    """Add both commands to `neox-config`."""
    group.add_command(_estimate_command)
    group.add_command(_suggest_command)


def _reporting_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Errors that are written for the user end the command with their message and exit code."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except NeoXError as error:
            click.echo(str(error), err=True)
            sys.exit(error.exit_code)

    return run


def _common_options(command: Callable[..., None]) -> Callable[..., None]:
    options = [
        click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path)),
        click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="Change one value."),
        click.option(
            "-d", "--directory", type=click.Path(path_type=Path), help="Folder that the files are in."
        ),
        click.option(
            "--vocab-size",
            type=click.IntRange(min=1),
            help="Entries of the tokenizer; default: those of its file, else the usual number.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command("estimate")
@_common_options
@cluster_options
@click.option("--device-memory", callback=_read_bytes, help="Say whether it fits, as in 80GiB.")
@click.option(
    "--tflops",
    type=click.FloatRange(min=0, min_open=True),
    help="TFLOP/s of a device as training logs it, for the time to train-iters.",
)
@click.option(
    "--mfu",
    type=click.FloatRange(0, 1, min_open=True),
    help="Instead of --tflops: the part of --peak-tflops that is attained.",
)
@click.option(
    "--peak-tflops",
    type=click.FloatRange(min=0, min_open=True),
    default=312.0,
    show_default=True,
    help="TFLOP/s on a device's data sheet (312 is an A100's).",
)
@_reporting_errors
def _estimate_command(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    directory: Path | None,
    vocab_size: int | None,
    devices: int | None,
    hostfile: str | None,
    device_memory: int | None,
    tflops: float | None,
    mfu: float | None,
    peak_tflops: float,
) -> None:
    """Parameters, memory, operations, communication and time of a training, without starting it."""
    config = load_config(files, overrides=overrides, directory=directory)
    resolved = resolve_for(config, devices=devices, hostfile=hostfile)
    result, origin = estimate_resolved(resolved, vocab_size=vocab_size)
    click.echo(render_estimate(result, device_memory=device_memory, vocabulary_origin=origin))
    speed = tflops or (mfu * peak_tflops if mfu else None)
    if speed is not None:
        click.echo(render_training_time(result, iterations=config.training.train_iters, tflops=speed))


@click.command("suggest")
@_common_options
@click.option("--devices", type=click.IntRange(min=1), required=True, help="Of the whole job.")
@click.option("--device-memory", callback=_read_bytes, required=True, help="Of one device, as in 80GiB.")
@click.option(
    "--devices-per-host", type=click.IntRange(min=1), default=8, show_default=True, help="Devices of a host."
)
@click.option(
    "--tflops",
    type=click.FloatRange(min=0, min_open=True),
    default=ATTAINED_TFLOPS,
    show_default=True,
    help="What a device attains in large matrix products.",
)
@click.option(
    "--samples", type=click.IntRange(min=1), help="Of one update; default: as the configuration says."
)
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Layouts to show.")
@_reporting_errors
def _suggest_command(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    directory: Path | None,
    vocab_size: int | None,
    devices: int,
    device_memory: int,
    devices_per_host: int,
    tflops: float,
    samples: int | None,
    top: int,
) -> None:
    """The fastest parallel layouts that fit into the devices' memory."""
    config = load_config(files, overrides=overrides, directory=directory)
    entries, _ = _vocabulary(config, vocab_size)
    resolved = resolve(_on_one_device(config), devices=1)
    shape, like = shape_of(resolved, vocab_size=entries), layout_of(resolved)
    cluster = Cluster(
        devices=devices, memory=device_memory, devices_per_host=min(devices_per_host, devices), tflops=tflops
    )
    wanted = samples or _samples(config, devices)
    found = suggest(shape, cluster, samples=wanted, like=like)
    click.echo(render_suggestions(found[:top], cluster=cluster, samples=wanted, seq_length=shape.seq_length))
    if not found:
        raise click.exceptions.Exit(1)


def estimate_resolved(resolved: Resolved, *, vocab_size: int | None = None) -> tuple[Estimate, str]:
    """What a resolved configuration costs, and where the size of its vocabulary was found.

    Args:
        resolved: the configuration.
        vocab_size: entries of the tokenizer; None looks into its file, or takes the usual number.

    Raises:
        ConfigError: the tokenizer's file is none.
    """
    entries, origin = _vocabulary(resolved.config, vocab_size)
    return estimate(shape_of(resolved, vocab_size=entries), layout_of(resolved)), origin


def _on_one_device(config: NeoXConfig) -> NeoXConfig:
    """The same model, for which the layout in its file does not matter."""
    parallelism = config.parallelism.replaced(pipe_parallel_size=0, model_parallel_size=1)
    training = config.training.replaced(train_batch_size=None)
    config = without_elasticity(config)
    return config.model_copy(update={"parallelism": parallelism, "training": training})


def _samples(config: NeoXConfig, devices: int) -> int:
    """Of one update on so many devices."""
    training, elastic = config.training, config.elasticity.elasticity
    if elastic.enabled:
        return resolve(config, devices=devices).derived.train_batch_size
    if training.train_batch_size is not None:
        return training.train_batch_size
    # The batch is not given, so the fewest devices are those of one copy.
    copies = max(1, devices // fewest_devices(config))
    return (
        (training.train_micro_batch_size_per_gpu or 1) * (training.gradient_accumulation_steps or 1) * copies
    )


def _vocabulary(config: NeoXConfig, given: int | None) -> tuple[int, str]:
    """Entries of the tokenizer, and where the number comes from."""
    if given is not None:
        return given, "given"
    found = read_vocabulary_size(config.tokenizer)
    if found is not None:
        return found, "the tokenizer's"
    kind = config.tokenizer.tokenizer_type
    return USUAL_VOCABULARY[kind], f"usual with {kind}; its file is not here, see --vocab-size"

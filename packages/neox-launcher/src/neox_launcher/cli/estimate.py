"""The commands `neox-config estimate` (memory and time of a run) and `suggest` (faster layouts)."""

import math
import re
import shlex
from typing import Any

import click

from neox_config import NeoXConfig, load_config, resolve
from neox_config.command_line import option
from neox_config.derive.elasticity import without_elasticity
from neox_config.describe.estimate_tables import (
    fits,
    render_estimate,
    render_step,
    render_suggestions,
    render_training_time,
)
from neox_config.estimate.resolved import estimate_resolved, vocabulary_of
from neox_config.estimate.setup import fewest_devices, read_vocabulary_size, setup_of
from neox_config.estimate.step import refuse_unknown, step_collectives
from neox_config.estimate.suggest import ATTAINED_TFLOPS, Cluster
from neox_config.estimate.suggest import suggest as suggest_layouts
from neox_config.estimate.widths import notes_on_widths
from neox_launcher.cli.cluster import (
    CLUSTER,
    MOST_DEVICES,
    cluster_options,
    resolve_for,
    show_notes,
)
from neox_launcher.cli.habits import ConfigurationCommand
from neox_launcher.cli.options import CONFIGURATION, configuration_options
from neox_launcher.plan.epochs import note_on_iterations

__all__ = ["estimate", "parse_bytes", "read_bytes", "suggest"]

_SPEED, _RESULT = "Speed", "Result"
_UNITS = {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


# Upper limits of options, far beyond any computer.
_MOST_BYTES = 2**60
_MOST_TOKENS = 10**9


class _Number(click.FloatRange):
    """A number that is neither infinite nor NaN, which click compares with no limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or report why it is not one."""
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is not a number", param, ctx)


_TFLOPS = _Number(1e-6, 1e9)


def read_bytes(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Return the number of bytes that an option gives, or report why it is not one."""
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from error


def parse_bytes(text: str) -> int:
    """Return the number of bytes of a size such as `80GiB`, `80 GB` or `512MiB`.

    Raises:
        ValueError: the text is not a size.
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a memory size with a unit; write it as 80GiB, 40GB or 512MiB")
    size = float(found[1]) * _UNITS[found[2].upper()]
    if size > _MOST_BYTES:
        raise ValueError(f"{text[:40]} is more than {_MOST_BYTES // _UNITS['TIB']:,} TiB")
    return round(size)


_vocab_size = option(
    "--vocab-size",
    heading=CONFIGURATION,
    type=click.IntRange(1, _MOST_TOKENS),
    help="Vocabulary size of the tokenizer. Default: read from its file, else the usual size of its type.",
)


@click.command(
    "estimate",
    cls=ConfigurationCommand,
    examples=(
        "neox-config estimate small.yml --devices 8 --device-memory 80GiB",
        "neox-config estimate small.yml cluster.yml --hostfile hosts --tflops 150",
    ),
    exit_codes={1: "it does not fit into --device-memory"},
)
@configuration_options
@_vocab_size
@cluster_options
@option(
    "--device-memory",
    heading=CLUSTER,
    metavar="SIZE",
    callback=read_bytes,
    help="Memory of one device, such as 80GiB, to compare with.",
)
@option(
    "--cpu",
    "on_cpu",
    heading=CLUSTER,
    is_flag=True,
    help="The devices are processes on CPUs, not GPUs: their memory is without that of CUDA.",
)
@option(
    "--tflops",
    heading=_SPEED,
    type=_TFLOPS,
    help="TFLOP/s per device as logged by training; used to estimate the time for train-iters.",
)
@option(
    "--mfu",
    heading=_SPEED,
    type=_Number(1e-6, 1),
    help="MFU (full): attained fraction of --peak-tflops, as an alternative to --tflops.",
)
@option(
    "--peak-tflops",
    heading=_SPEED,
    type=_TFLOPS,
    default=312.0,
    help="Peak TFLOP/s of a device according to its data sheet (312 for an A100).",
)
@option(
    "--step",
    heading=_RESULT,
    is_flag=True,
    help="Also list the collectives of one update, by part of the step and operation.",
)
def estimate(
    files: tuple[str, ...],
    overrides: tuple[str, ...],
    directory: str | None,
    vocab_size: int | None,
    devices: int | None,
    hostfile: str | None,
    device_memory: int | None,
    on_cpu: bool,
    tflops: float | None,
    mfu: float | None,
    peak_tflops: float,
    step: bool,
) -> None:
    """Estimate parameters, memory, operations, communication and time of a run without starting it."""
    config = load_config(files, overrides=overrides, directory=directory)
    resolved = resolve_for(config, devices=devices, hostfile=hostfile)
    notes = note_on_iterations(resolved.config)
    if not on_cpu:
        known = vocab_size or read_vocabulary_size(config.tokenizer)
        notes += notes_on_widths(resolved, vocab_size=known)
    show_notes(notes, config)
    device = "cpu" if on_cpu else "cuda"
    result, origin = estimate_resolved(resolved, vocab_size=vocab_size, device=device)
    if step:
        refuse_unknown(resolved)
    click.echo(render_estimate(result, device_memory=device_memory, vocabulary_origin=origin))
    speed = tflops or (mfu * peak_tflops if mfu else None)
    if speed is not None and resolved.config.training.train_iters is not None:
        click.echo(render_training_time(result, iterations=resolved.config.training.iterations, tflops=speed))
    if step:
        click.echo(render_step(result, step_collectives(result.setup, device=device)))
    if result.setup.devices > 1:
        options = shlex.join([*files, *(f"--set={override}" for override in overrides)])
        click.echo(f"\nprove on CPUs what this layout computes: neox-launch verify-layout {options}")
    if device_memory is not None and not fits(result, device_memory):
        raise click.exceptions.Exit(1)


@click.command(
    "suggest",
    cls=ConfigurationCommand,
    examples=(
        "neox-config suggest small.yml --devices 64 --device-memory 80GiB",
        "neox-config suggest small.yml --devices 64 --device-memory 80GiB --samples 1024 --top 3",
    ),
    exit_codes={1: "no layout fits"},
)
@configuration_options
@_vocab_size
@option(
    "--devices",
    heading=CLUSTER,
    type=click.IntRange(1, MOST_DEVICES),
    required=True,
    help="Number of devices of the whole job.",
)
@option(
    "--device-memory",
    heading=CLUSTER,
    metavar="SIZE",
    callback=read_bytes,
    required=True,
    help="Memory of one device, such as 80GiB.",
)
@option(
    "--devices-per-host",
    heading=CLUSTER,
    type=click.IntRange(1, 1024),
    default=8,
    help="Number of devices per host.",
)
@option(
    "--tflops",
    heading=_SPEED,
    type=_TFLOPS,
    default=ATTAINED_TFLOPS,
    help="Attained TFLOP/s per device in large matrix products.",
)
@option(
    "--samples",
    heading=_RESULT,
    type=click.IntRange(1, _MOST_TOKENS),
    help="Train batch size in samples per update. Default: from the configuration.",
)
@option("--top", heading=_RESULT, type=click.IntRange(min=1), default=10, help="Number of layouts to print.")
def suggest(
    files: tuple[str, ...],
    overrides: tuple[str, ...],
    directory: str | None,
    vocab_size: int | None,
    devices: int,
    device_memory: int,
    devices_per_host: int,
    tflops: float,
    samples: int | None,
    top: int,
) -> None:
    """Print the fastest parallel layouts that fit into the memory of the devices."""
    config = load_config(files, overrides=overrides, directory=directory)
    # Layouts do not depend on the number of iterations, which train-epochs leaves open.
    iterations = config.training.train_iters or 1
    config = config.model_copy(update={"training": config.training.replaced(train_iters=iterations)})
    entries, _ = vocabulary_of(config, vocab_size)
    resolved = resolve(_on_one_device(config), devices=1)
    cluster = Cluster(
        devices=devices, memory=device_memory, devices_per_host=min(devices_per_host, devices), tflops=tflops
    )
    wanted = samples or _samples(config, devices)
    found = suggest_layouts(setup_of(resolved, vocab_size=entries), cluster, samples=wanted)
    length = resolved.run.batch.length
    click.echo(render_suggestions(found[:top], cluster=cluster, samples=wanted, seq_length=length))
    if not found:
        raise click.exceptions.Exit(1)


def _on_one_device(config: NeoXConfig) -> NeoXConfig:
    """Return the same configuration with the smallest layout, so that the given one cannot be refused."""
    parallelism = config.parallelism.replaced(
        pipe_parallel_size=0, model_parallel_size=1, expert_parallel_size=1
    )
    training = config.training.replaced(train_batch_size=None)
    config = without_elasticity(config)
    return config.model_copy(update={"parallelism": parallelism, "training": training})


def _samples(config: NeoXConfig, devices: int) -> int:
    """Return the samples of one update on this number of devices."""
    training, elastic = config.training, config.elasticity.elasticity
    if elastic.enabled:
        return resolve(config, devices=devices).run.batch.whole
    if training.train_batch_size is not None:
        return training.train_batch_size
    # Without a given batch size, the fewest devices are those of one copy of the model.
    copies = max(1, devices // fewest_devices(config))
    return (
        (training.train_micro_batch_size_per_gpu or 1) * (training.gradient_accumulation_steps or 1) * copies
    )

"""`neox-config estimate` and `neox-config suggest`: what a training costs, and how to run it faster."""

import re
import sys
from collections.abc import Callable, Sequence
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
from neox_launcher.config.suggest import ATTAINED_TFLOPS, USABLE_MEMORY, Cluster, Suggestion, suggest
from neox_launcher.config_cluster import cluster_options, resolve_for
from neox_launcher.errors import NeoXError

__all__ = [
    "estimate_resolved",
    "parse_bytes",
    "register",
    "render_estimate",
    "render_suggestions",
    "render_training_time",
]

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}

Row = tuple[str, str, str]


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


def render_estimate(result: Estimate, *, device_memory: int | None, vocabulary_origin: str = "") -> str:
    """An estimate as text.

    Args:
        result: the estimate.
        device_memory: bytes of a device, to be compared with; None leaves that out.
        vocabulary_origin: where the size of the vocabulary comes from.
    """
    sections = [_layout_rows(result), _parameter_rows(result, vocabulary_origin), _memory_rows(result)]
    sections += [_work_rows(result), _communication_rows(result)]
    text = _table([row for section in sections for row in (*section, ("", "", ""))][:-1])
    return text if device_memory is None else f"{text}\n\n{_verdict(result, device_memory)}"


def render_training_time(result: Estimate, *, iterations: int, tflops: float) -> str:
    """Time and device-hours of a whole training at a speed, as text."""
    seconds = result.seconds_per_iteration(tflops)
    hours = seconds * iterations / 3600
    tokens = result.tokens_per_iteration
    rows = [
        ("", "", ""),
        ("training", f"{iterations:,} iterations", f"{iterations * tokens / 1e9:,.1f} billion tokens"),
        ("  speed of a device", f"{tflops:,.1f} TFLOP/s", f"{tokens / seconds:,.0f} tokens/s on all"),
        ("  per iteration", f"{seconds:,.2f} s", ""),
        ("  in all", f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:,.1f} hours", ""),
        ("  device-hours", f"{hours * result.layout.devices:,.0f}", ""),
    ]
    return _table(rows)


def render_suggestions(
    found: Sequence[Suggestion], *, cluster: Cluster, samples: int, seq_length: int
) -> str:
    """Layouts as a table, fastest first; a sentence where there is none."""
    job = f"{cluster.devices:,} devices of {_size(cluster.memory)}, {samples:,} samples per iteration"
    if not found:
        return (
            f"nothing fits: {job}\n"
            "use more devices, add zero_optimization.offload_optimizer, "
            "or choose --samples that the devices divide"
        )
    names = ("model", "pipe", "data", "zero", "micro-batch", "accumulation", "recomputed", "memory", "time")
    lines = [(*names, "tokens/s")] + [_suggestion_cells(one, samples * seq_length) for one in found]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    best = found[0].layout
    settings = [
        f"pipe-parallel-size: {best.stages if best.stages > 1 else 0}",
        f"model-parallel-size: {best.model_parallel}",
        f"zero_optimization: {{stage: {best.zero_stage}}}",
        f"train-micro-batch-size-per-gpu: {best.micro_batch}",
        f"gradient-accumulation-steps: {best.accumulation}",
        f"checkpoint-activations: {'true' if best.segment_layers is not None else 'false'}",
    ]
    first = "the first as settings:\n  " + "\n  ".join(settings)
    return f"{job}; estimates for putting layouts in order\n\n" + "\n".join(table) + f"\n\n{first}"


def _suggestion_cells(one: Suggestion, tokens: int) -> tuple[str, ...]:
    layout = one.layout
    return (
        str(layout.model_parallel),
        str(layout.stages if layout.stages > 1 else 0),
        str(layout.data_parallel),
        str(layout.zero_stage),
        str(layout.micro_batch),
        str(layout.accumulation),
        "no" if layout.segment_layers is None else "yes",
        _size(one.memory.total),
        f"{one.seconds:.2f} s",
        f"{tokens / one.seconds:,.0f}",
    )


def _layout_rows(result: Estimate) -> list[Row]:
    layout = result.layout
    split = f"model {layout.model_parallel} x pipe {layout.stages} x data {layout.data_parallel}"
    return [
        ("devices", f"{layout.devices:,}", f"{split}, ZeRO stage {layout.zero_stage}"),
        (
            "samples per iteration",
            f"{layout.samples:,}",
            f"micro-batch {layout.micro_batch} x accumulation {layout.accumulation} x data",
        ),
        ("tokens per iteration", f"{result.tokens_per_iteration:,}", ""),
    ]


def _parameter_rows(result: Estimate, vocabulary_origin: str) -> list[Row]:
    total = result.total_parameters
    rows: list[Row] = [("parameters", f"{total:,}", "")]
    for part, count in result.parameters.items():
        note = f"{100 * count / total:.1f} %"
        if part == "embedding":
            note += f", vocabulary {result.shape.vocab_size:,}"
            note += f" ({vocabulary_origin})" if vocabulary_origin else ""
        if part == "head" and result.shape.is_tied:
            note = "shares the embedding"
        rows.append((f"  {part}", f"{count:,}", note))
    return rows


def _memory_rows(result: Estimate) -> list[Row]:
    stage = result.fullest_stage
    memory, layout = result.memory[stage], result.layout
    where = f"stage {stage} of {layout.stages}, the fullest" if layout.stages > 1 else ""
    recomputed = layout.segment_layers
    kept = "all kept" if recomputed is None else f"recomputed in segments of {recomputed}"
    rows = [
        ("memory of a device", _size(memory.total), where),
        ("  weights", _size(memory.weights), ""),
        ("  gradients", _size(memory.gradients), ""),
        ("  optimizer states", _size(memory.optimizer), "master weights included"),
        ("  activations", _size(memory.activations), kept),
        ("  buffers", _size(memory.buffers), "gradient buckets, and 1 GiB for CUDA and NCCL"),
    ]
    if memory.host:
        rows.append(("host memory for it", _size(memory.host), "offloaded"))
    return rows


def _work_rows(result: Estimate) -> list[Row]:
    rows = [
        ("operations per token", f"{result.flops_per_token / 1e9:,.2f} GFLOP", "forward and backward"),
        ("  per iteration", f"{result.flops_per_iteration / 1e15:,.3f} PFLOP", "on all devices"),
    ]
    if result.computed_flops_per_token != result.flops_per_token:
        rows += [
            ("  per token, recomputed", f"{result.computed_flops_per_token / 1e9:,.2f} GFLOP", ""),
            ("  per iteration, recomputed", f"{result.computed_flops_per_iteration / 1e15:,.3f} PFLOP", ""),
        ]
    return [*rows, ("pipeline bubble", f"{100 * result.bubble:.1f} %", "of the time")]


def _communication_rows(result: Estimate) -> list[Row]:
    sent = result.communication
    return [
        ("sent by a device", "", "per iteration"),
        ("  data parallel", _size(sent.data), ""),
        ("  model parallel", _size(sent.model), ""),
        ("  pipeline", _size(sent.pipe), ""),
    ]


def _verdict(result: Estimate, device_memory: int) -> str:
    needed = result.memory[result.fullest_stage].total
    usable = USABLE_MEMORY * device_memory
    part = f"{_size(needed)} of {_size(device_memory)}"
    if needed <= usable:
        return f"fits: {part}"
    short = f"{100 * (1 - USABLE_MEMORY):.0f} % is left to the allocator"
    return (
        f"DOES NOT FIT: {part} ({short}); `neox-config suggest --devices {result.layout.devices} "
        f"--device-memory {_size(device_memory).replace(' ', '')}` lists layouts that do"
    )


def _size(count: int) -> str:
    """Bytes for people, in the unit that leaves at least one digit before the point."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count / 2**10:,.2f} KiB" if count else "0"


def _table(rows: Sequence[Row]) -> str:
    """Names to the left, values to the right, remarks after them."""
    names = max(len(name) for name, _, _ in rows)
    values = max(len(value) for _, value, _ in rows)
    return "\n".join(
        f"{name.ljust(names)}  {value.rjust(values)}  {note}".rstrip() for name, value, note in rows
    )

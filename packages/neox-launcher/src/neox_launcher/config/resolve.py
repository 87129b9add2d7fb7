"""Configuration and number of devices together: batch arithmetic, precision and attention per layer."""

import base64
import binascii
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from neox_launcher.config.attention_layers import expand_attention
from neox_launcher.config.curricula import curricula_of_lengths
from neox_launcher.config.elasticity import elastic_batch, elastic_devices
from neox_launcher.config.layer_sharing import weight_owners
from neox_launcher.config.problems import Place, Problem, config_error, in_words, place_of
from neox_launcher.config.schema import NeoXConfig
from neox_launcher.config.sections.model import GATED_ACTIVATIONS
from neox_launcher.errors import ConfigError

__all__ = ["Derived", "Resolved", "decode_resolved", "encode_resolved", "resolve"]

Precision = Literal["fp32", "bf16", "fp16"]


class Derived(BaseModel):
    """What follows from the configuration and the devices; frozen.

    Attributes:
        world_size: devices (workers) of the whole job.
        hosts: hosts that they are on.
        data_parallel_size: copies of the model.
        model_parallel_size: devices that share each layer.
        pipe_parallel_size: stages, at least 1.
        uses_pipeline: the pipeline engine runs the model, be it with a single stage.
        train_batch_size: samples of one update over all devices.
        micro_batch_size: samples that a device handles at once.
        accumulation: micro-batches of one update.
        precision: number format of weights and activations.
        attention_types: one per layer.
        intermediate_size: inner width of the feed-forward part.
        lr_decay_iters: iterations until the learning rate stops falling.
        backend: library under torch.distributed; None lets the worker choose (nccl with GPUs, else gloo).
        weight_owners: of each layer, the first one that has the same weights; None where none are shared.
        elastic_devices: numbers of devices that share this training's batch size; empty without elasticity.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), defer_build=True)

    world_size: int
    hosts: int
    data_parallel_size: int
    model_parallel_size: int
    pipe_parallel_size: int
    uses_pipeline: bool
    train_batch_size: int
    micro_batch_size: int
    accumulation: int
    precision: Precision
    attention_types: tuple[str, ...]
    intermediate_size: int
    lr_decay_iters: int
    backend: str | None
    weight_owners: tuple[int, ...] | None = None
    elastic_devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A configuration that is ready to run.

    Args:
        config: what the user decided.
        derived: what follows from it on these devices.
    """

    config: NeoXConfig
    derived: Derived


def resolve(config: NeoXConfig, *, devices: int, hosts: int = 1) -> Resolved:
    """The configuration for a number of devices.

    Args:
        config: as loaded.
        devices: workers of the whole job, one per device.
        hosts: hosts that they are on; named in messages.

    Raises:
        ConfigError: with every problem found.
    """
    problems: list[Problem] = []
    split = _split_devices(config, devices, hosts, problems)
    elastic = config.elasticity.elasticity.enabled
    batch = (_elastic_sizes if elastic else _batch_sizes)(config, split, problems)
    problems += _indivisible_widths(config, split.model)
    problems += _unequal_neighbours(config, split)
    problems += _unequal_shares_of_short_sequences(config, split)
    if problems:
        located = [_located(problem, config) for problem in problems]
        raise config_error(located, config.files)
    iterations = config.training.train_iters
    derived = Derived(
        world_size=devices,
        hosts=hosts,
        data_parallel_size=split.data,
        model_parallel_size=split.model,
        pipe_parallel_size=split.pipe,
        uses_pipeline=config.parallelism.pipe_parallel_size >= 1,
        train_batch_size=batch.train,
        micro_batch_size=batch.micro,
        accumulation=batch.accumulation,
        precision=_precision(config),
        attention_types=expand_attention(config.attention.attention_config, config.model.num_layers),
        intermediate_size=_intermediate_size(config),
        lr_decay_iters=config.lr_schedule.lr_decay_iters or iterations,
        backend=config.parallelism.distributed_backend,
        weight_owners=weight_owners(
            config.model.num_layers, config.model.num_unique_layers, config.model.param_sharing_style
        ),
        elastic_devices=batch.shared_by,
    )
    return Resolved(config=config, derived=derived)


def encode_resolved(resolved: Resolved) -> str:
    """A resolved configuration as one word of a command line; `decode_resolved` reads it."""
    config = resolved.config
    content = {
        "config": config.given(),
        "derived": resolved.derived.model_dump(mode="json"),
        "sources": {name: (place.file, place.line, place.spelling) for name, place in config.sources.items()},
        "files": config.files,
    }
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(content).encode(), 9)).decode()


def decode_resolved(text: str) -> Resolved:
    """The resolved configuration that `encode_resolved` wrote.

    Raises:
        ConfigError: the text is damaged or was written by another version.
    """
    try:
        content: dict[str, Any] = json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
        config = NeoXConfig.from_sections(content["config"])
        derived = Derived.model_validate(content["derived"])
        sources = {name: Place(*place) for name, place in content["sources"].items()}
        files = tuple(content["files"])
    except (binascii.Error, zlib.error, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the resolved configuration on the command line cannot be read ({type(error).__name__}); "
            "start workers with neox-launch of the same version"
        ) from error
    return Resolved(config=config.with_origin(sources=sources, notices=(), files=files), derived=derived)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    data: int
    model: int
    pipe: int


def _split_devices(config: NeoXConfig, devices: int, hosts: int, problems: list[Problem]) -> _Split:
    model = max(1, config.parallelism.model_parallel_size)
    pipe = max(1, config.parallelism.pipe_parallel_size)
    job = f"the {devices:,} device{'s' if devices > 1 else ''} of this job"
    if hosts > 1:
        job += f" ({hosts} hosts)"
    if devices % (model * pipe):
        name = "model_parallel_size" if devices % model or model > 1 else "pipe_parallel_size"
        other = model if name == "pipe_parallel_size" else pipe
        fitting = [str(size) for size in range(1, devices + 1) if devices % (size * other) == 0]
        what = (
            f"does not divide {job}"
            if other == 1
            else f"times the other parallel size ({other}) does not divide {job}"
        )
        shown = ", ".join(fitting[:8])
        problems.append(Problem(name, what, f"use {shown}" if fitting else "use more devices"))
    return _Split(data=max(1, devices // (model * pipe)), model=model, pipe=pipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    train: int
    micro: int
    accumulation: int
    shared_by: tuple[int, ...] = ()


def _elastic_sizes(config: NeoXConfig, split: _Split, problems: list[Problem]) -> _Batch:
    """What the elasticity block chooses for so many devices."""
    block = config.elasticity.elasticity
    try:
        counts = elastic_devices(block, devices_per_copy=split.model)
        chosen = elastic_batch(block, devices=split.data * split.model, devices_per_copy=split.model)
    except ValueError as error:
        what, _, remedy = str(error).partition("; ")
        problems.append(Problem("elasticity.enabled", what, remedy))
        return _Batch(train=split.data, micro=1, accumulation=1)
    return _Batch(train=chosen.train, micro=chosen.micro, accumulation=chosen.accumulation, shared_by=counts)


def _batch_sizes(config: NeoXConfig, split: _Split, problems: list[Problem]) -> _Batch:
    """Any two of the three sizes give the third; one alone comes with an accumulation of 1."""
    training, copies = config.training, split.data
    train, micro = training.train_batch_size, training.train_micro_batch_size_per_gpu
    accumulation = training.gradient_accumulation_steps
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        return _Batch(train=micro * accumulation * copies, micro=micro, accumulation=accumulation)
    if micro is not None and accumulation is not None:
        if micro * accumulation * copies != train:
            product = f"{micro} x {accumulation} x {copies}"
            problems.append(
                Problem(
                    "train_batch_size",
                    f"is not micro-batch x accumulation x data-parallel size: {product} = "
                    f"{micro * accumulation * copies:,}",
                    "leave one of the three out; it is computed",
                )
            )
        return _Batch(train=train, micro=micro, accumulation=accumulation)
    known = micro or accumulation or 1
    name = "micro-batch" if micro is not None else "accumulation"
    if train % (known * copies):
        product = (
            f"{name} {known} x data-parallel size {copies}"
            if known > 1
            else f"the data-parallel size {copies}"
        )
        nearest = max(1, round(train / (known * copies))) * known * copies
        problems.append(
            Problem(
                "train_batch_size", f"is not divisible by {product}", f"use {nearest:,}, or another {name}"
            )
        )
    other = max(1, train // (known * copies))
    if micro is not None:
        return _Batch(train=train, micro=micro, accumulation=other)
    return _Batch(train=train, micro=other, accumulation=known)


def _indivisible_widths(config: NeoXConfig, model_parallel_size: int) -> Iterator[Problem]:
    """Tensor-parallel ranks share heads, feed-forward channels and a split sequence evenly."""
    if config.model.num_attention_heads % model_parallel_size:
        yield Problem(
            "num_attention_heads",
            f"cannot be shared by {model_parallel_size} model-parallel devices",
            "use a multiple of model-parallel-size",
        )
    elif config.model.num_kv_heads is not None and config.model.num_kv_heads % model_parallel_size:
        yield Problem(
            "num_kv_heads",
            f"cannot be shared by {model_parallel_size} model-parallel devices",
            "use a multiple of model-parallel-size",
        )
    if config.parallelism.sequence_parallel and config.model.seq_length % model_parallel_size:
        multiple = config.model.seq_length // model_parallel_size * model_parallel_size
        yield Problem(
            "seq_length",
            f"cannot be shared by {model_parallel_size} model-parallel devices, as sequence-parallel asks",
            f"use {multiple or model_parallel_size}, or sequence-parallel: false",
        )
    width = _intermediate_size(config)
    if width % model_parallel_size:
        multiple = -(-width // model_parallel_size) * model_parallel_size
        yield Problem(
            "intermediate_size",
            f"{width:,} channels cannot be shared by {model_parallel_size} model-parallel devices",
            f"set intermediate-size: {multiple}, or another model-parallel-size",
            value=f"{width}",
        )


def _unequal_shares_of_short_sequences(config: NeoXConfig, split: _Split) -> Iterator[Problem]:
    """Ranks that share the sequence share it evenly at every length of a curriculum."""
    for block in curricula_of_lengths(config) if config.parallelism.sequence_parallel else ():
        curriculum = config.value_of(block)
        pace = curriculum.schedule_config
        lengths = {
            "min_difficulty": (curriculum.min_difficulty,),
            "max_difficulty": (curriculum.max_difficulty,),
            "schedule_config.difficulty_step": (pace.difficulty_step,),
            "schedule_config.difficulty": pace.difficulty or (),
        }
        for name, values in lengths.items():
            if any(value is not None and value % split.model for value in values):
                yield Problem(
                    f"{block}.{name}",
                    f"cannot be shared by {split.model} model-parallel devices, as sequence-parallel asks",
                    f"use a multiple of {split.model}, or sequence-parallel: false",
                )


def _unequal_neighbours(config: NeoXConfig, split: _Split) -> Iterator[Problem]:
    """ZeRO's second partition is over neighbouring devices, which must hold the same part of the model."""
    zero = config.zero.zero_optimization
    size, name = zero.zero_hpz_partition_size, "zero_optimization.zero_hpz_partition_size"
    if size == 1 or zero.stage != 3:
        return
    if split.model > 1:
        yield Problem(name, "works only without tensor parallelism", "set model-parallel-size: 1")
    elif split.data % size:
        yield Problem(name, f"does not divide the data-parallel size {split.data}", "use a divisor of it")


def _intermediate_size(config: NeoXConfig) -> int:
    model = config.model
    if model.intermediate_size is not None:
        return model.intermediate_size
    if model.activation in GATED_ACTIVATIONS:
        return 8 * model.hidden_size // 3
    return 4 * model.hidden_size


def _precision(config: NeoXConfig) -> Precision:
    chosen = config.precision
    if chosen.fp16.enabled or chosen.precision == "fp16":
        return "fp16"
    if chosen.bf16.enabled or chosen.precision == "bfloat16":
        return "bf16"
    return "fp32"


def _located(problem: Problem, config: NeoXConfig) -> Problem:
    return problem.located(place_of(config.sources, problem.name), in_words(config.value_of(problem.name)))

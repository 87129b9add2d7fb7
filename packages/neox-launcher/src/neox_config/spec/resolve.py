"""Combine configuration and number of devices: batch sizes, precision, and attention types per layer."""

import base64
import binascii
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from neox_config.derive.elasticity import ElasticBatch, elastic_batch, elastic_devices
from neox_config.derive.experts import expert_ranks, inner_widths
from neox_config.derive.pipeline import unsuitable_micro_batches
from neox_config.derive.problems import refusal
from neox_config.derive.widths import MLP_SIZES, mlp_width
from neox_config.errors import ConfigError
from neox_config.extras.data_efficiency.curricula import curricula_of_lengths
from neox_config.facts.widths import next_aligned
from neox_config.pluralize import first_few
from neox_config.problems import Place, Problem
from neox_config.schema.config import NeoXConfig
from neox_config.schema.parameter import Section
from neox_config.spec.model import ModelSpec
from neox_config.spec.read_model import read_model
from neox_config.spec.read_run import Sizes, read_data, read_run, read_update
from neox_config.spec.run import Precision, RunSpec
from neox_config.spec.update import DataSpec, UpdateSpec

__all__ = [
    "Resolved",
    "decode_resolved",
    "derived_values",
    "encode_resolved",
    "engine_json",
    "resolve",
]

# Upper bound on the parallel sizes tried for the suggestion.
_MOST_SUGGESTED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A configuration that is ready to run, and everything that was decided for it.

    Args:
        config: the configuration of the user.
        sizes: what follows from the number of devices.
        model: the model.
        run: how it runs.
        update: how its weights are updated.
        data: the samples.
    """

    config: NeoXConfig
    sizes: Sizes
    model: ModelSpec
    run: RunSpec
    update: UpdateSpec
    data: DataSpec

    @classmethod
    def of(cls, config: NeoXConfig, sizes: Sizes) -> Self:
        """Return what follows from a configuration whose rules hold, on these devices."""
        model = read_model(config)
        return cls(
            config=config,
            sizes=sizes,
            model=model,
            run=read_run(config, sizes, model),
            update=read_update(config),
            data=read_data(config),
        )

    def replaced(self, **sections: Section) -> Self:
        """Return the same with other sections of the configuration, which are not checked."""
        return self.of(self.config.model_copy(update=sections), self.sizes)

    def in_float64(self) -> Self:
        """Return the same with all numbers in float64, and a loss without a scale, to compare layouts.

        The engine must be torch's.
        """
        run = replace(
            self.run,
            precision=Precision(weights="fp64", autocast=None, loss=None),
            gradients=replace(self.run.gradients, accumulate_in="fp64", reduce_in=None),
        )
        return replace(self, run=run, update=replace(self.update, scaling=None))


def derived_values(resolved: Resolved) -> dict[str, Any]:
    """Return what was decided, by the names under which it is printed and recorded."""
    layout, batch, precision = resolved.run.layout, resolved.run.batch, resolved.run.precision
    owners = [layer.owner for layer in resolved.model.layers]
    return {
        "world_size": layout.world,
        "hosts": layout.hosts,
        "data_parallel_size": layout.data,
        "model_parallel_size": layout.tensor,
        "pipe_parallel_size": layout.stages,
        "uses_pipeline": layout.is_pipeline,
        "train_batch_size": batch.whole,
        "micro_batch_size": batch.micro,
        "accumulation": batch.accumulation,
        "precision": precision.weights,
        "attention_types": list(resolved.model.kinds),
        "mlp_width": mlp_width(resolved.config),
        "lr_decay_iters": resolved.update.decay_iterations or 0,
        "backend": layout.backend,
        "weight_owners": None if None in owners else owners,
        "elastic_devices": list(layout.elastic),
        "autocast": precision.autocast,
    }


def resolve(config: NeoXConfig, *, devices: int, hosts: int = 1) -> Resolved:
    """Resolve a configuration for a number of devices.

    Args:
        config: loaded configuration.
        devices: number of workers of the whole job, one per device.
        hosts: number of hosts, for messages.

    Raises:
        ConfigError: The configuration does not fit the devices; the message lists every problem.
    """
    problems: list[Problem] = []
    split = _split_devices(config, devices, hosts, problems)
    counts: tuple[int, ...] = ()
    if config.elasticity.elasticity.enabled:
        batch, counts = _elastic_sizes(config, split, problems)
    else:
        batch = _batch_sizes(config, split, problems)
    problems += _indivisible_widths(config, split.model)
    problems += _unequal_neighbours(config, split)
    problems += _unequal_experts(config, split)
    problems += _unequal_shares_of_short_sequences(config, split)
    problems += unsuitable_micro_batches(config, batch.accumulation)
    if problems:
        raise refusal(config, *problems)
    sizes = Sizes(
        world=devices,
        hosts=hosts,
        data=split.data,
        batch=batch.train,
        micro=batch.micro,
        accumulation=batch.accumulation,
        elastic=counts,
    )
    return Resolved.of(config, sizes)


def engine_json(resolved: Resolved) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a run as plain JSON values."""
    found: dict[str, Any] = json.loads(resolved.run.engine.settings)
    return found


def encode_resolved(resolved: Resolved) -> str:
    """Encode a resolved configuration as one command-line argument for `decode_resolved`."""
    config = resolved.config
    content = {
        "config": config.given(),
        "sizes": asdict(resolved.sizes),
        "sources": {name: (place.file, place.line, place.spelling) for name, place in config.sources.items()},
        "files": config.files,
    }
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(content, allow_nan=False).encode(), 9)).decode()


def decode_resolved(text: str) -> Resolved:
    """Decode a resolved configuration encoded by `encode_resolved`.

    Raises:
        ConfigError: The text is damaged or was written by another version.
    """
    try:
        content: dict[str, Any] = json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
        config = NeoXConfig.from_sections(content["config"])
        sizes = Sizes(**content["sizes"] | {"elastic": tuple(content["sizes"]["elastic"])})
        sources = {name: Place(*place) for name, place in content["sources"].items()}
        files = tuple(content["files"])
    except (binascii.Error, zlib.error, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the resolved configuration on the command line cannot be read ({type(error).__name__}); "
            "start workers with neox-launch of the same version",
            code="not-readable",
        ) from error
    return Resolved.of(config.with_origin(sources=sources, notices=(), files=files), sizes)


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
        sizes = range(1, min(devices, _MOST_SUGGESTED) + 1)
        fitting = [str(size) for size in sizes if devices % (size * other) == 0]
        what = (
            f"does not divide {job}"
            if other == 1
            else f"times the other parallel size ({other}) does not divide {job}"
        )
        shown = first_few(fitting, 8)
        problems.append(Problem(name, what, f"use {shown}" if fitting else "use more devices"))
    return _Split(data=max(1, devices // (model * pipe)), model=model, pipe=pipe)


def _elastic_sizes(
    config: NeoXConfig, split: _Split, problems: list[Problem]
) -> tuple[ElasticBatch, tuple[int, ...]]:
    """Return the batch sizes that the elasticity block chooses, and the numbers of devices they work with."""
    block = config.elasticity.elasticity
    try:
        counts = elastic_devices(block, devices_per_copy=split.model, copies=expert_ranks(config))
        devices = split.data * split.model
        return elastic_batch(block, devices=devices, devices_per_copy=split.model), counts
    except ValueError as error:
        what, _, remedy = str(error).partition("; ")
        problems.append(Problem("elasticity.enabled", what, remedy))
        return ElasticBatch(train=split.data, micro=1, accumulation=1), ()


def _batch_sizes(config: NeoXConfig, split: _Split, problems: list[Problem]) -> ElasticBatch:
    """Compute the batch sizes: two of the three give the third; one alone implies an accumulation of 1."""
    training, copies = config.training, split.data
    train, micro = training.train_batch_size, training.train_micro_batch_size_per_gpu
    accumulation = training.gradient_accumulation_steps
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        train = micro * accumulation * copies
    elif micro is not None and accumulation is not None:
        product = micro * accumulation * copies
        if product != train:
            what = "must equal micro-batch x accumulation x data-parallel size: "
            what += f"{micro} x {accumulation} x {copies} = {product:,}"
            problems.append(Problem("train_batch_size", what, f"set train-batch-size: {product}"))
    else:
        least = copies * (micro or accumulation or 1)
        if train % least:
            given = "micro-batch" if micro is not None else "accumulation"
            factor = f"{given} {least // copies} x data-parallel size {copies}"
            below = train // least * least
            remedy = f"use {' or '.join(f'{size:,}' for size in (below, below + least) if size)}"
            problems.append(
                Problem(
                    "train_batch_size",
                    f"is not divisible by {factor if least > copies else f'the data-parallel size {copies}'}",
                    remedy,
                )
            )
        other = max(1, train // least)
        micro, accumulation = (other, accumulation or 1) if micro is None else (micro, other)
    return ElasticBatch(train=train, micro=micro, accumulation=accumulation)


def _indivisible_widths(config: NeoXConfig, model_parallel_size: int) -> Iterator[Problem]:
    """Yield a problem for each size that the tensor-parallel ranks cannot divide evenly."""
    cannot = f"cannot be divided among {model_parallel_size} tensor-parallel devices"
    heads, shared = config.model.num_attention_heads, config.model.num_kv_heads
    if heads % model_parallel_size or (shared is not None and shared % model_parallel_size):
        name = "num_attention_heads" if heads % model_parallel_size else "num_kv_heads"
        yield Problem(name, cannot, "use a multiple of model-parallel-size")
    if config.parallelism.sequence_parallel and config.model.seq_length % model_parallel_size:
        multiple = config.model.seq_length // model_parallel_size * model_parallel_size
        yield Problem(
            "seq_length",
            f"{cannot} (sequence-parallel)",
            f"use {multiple or model_parallel_size}, or set sequence-parallel: false",
        )
    for name, width in inner_widths(config).items():
        if not width % model_parallel_size:
            continue
        multiple = next_aligned(width, ranks=model_parallel_size)
        if name != "mlp_width":
            remedy = f"set {name.replace('_', '-')}: {multiple}, or use another model-parallel-size"
            yield Problem(name, cannot, remedy, value=f"{width}")
            continue
        given = next((name for name in MLP_SIZES if config.value_of(name) is not None), None)
        gives = "" if given is None else f"gives an MLP width of {width:,}, which "
        instead = "" if given is None else f" instead of {given.replace('_', '-')}"
        yield Problem(
            given or "mlp_width",
            f"{gives}{cannot}",
            f"set mlp-width: {multiple}{instead}, or use another model-parallel-size",
            value=f"{width}" if given is None else None,
        )


def _unequal_shares_of_short_sequences(config: NeoXConfig, split: _Split) -> Iterator[Problem]:
    """Yield a problem for each length of a curriculum that sequence parallelism cannot divide evenly."""
    for block in curricula_of_lengths(config.data_efficiency) if config.parallelism.sequence_parallel else ():
        curriculum = config.value_of(block)
        settings = curriculum.schedule_config
        lengths = {
            "min_difficulty": (curriculum.min_difficulty,),
            "max_difficulty": (curriculum.max_difficulty,),
            "schedule_config.difficulty_step": (settings.difficulty_step,),
            "schedule_config.difficulty": settings.difficulty or (),
        }
        for name, values in lengths.items():
            if any(value is not None and value % split.model for value in values):
                yield Problem(
                    f"{block}.{name}",
                    f"cannot be divided among {split.model} tensor-parallel devices (sequence-parallel)",
                    f"use a multiple of {split.model}, or set sequence-parallel: false",
                )


def _unequal_experts(config: NeoXConfig, split: _Split) -> Iterator[Problem]:
    """Yield a problem if the data-parallel ranks do not form groups that divide the experts."""
    size = expert_ranks(config)
    if split.data % size:
        what = f"does not divide the data-parallel size {split.data}"
        yield Problem("expert_parallel_size", what, f"use a divisor of {split.data}")


def _unequal_neighbours(config: NeoXConfig, split: _Split) -> Iterator[Problem]:
    """Check ZeRO's secondary partition: adjacent devices must hold the same part of the model."""
    zero = config.zero.zero_optimization
    size, name = zero.zero_hpz_partition_size, "zero_optimization.zero_hpz_partition_size"
    if size == 1 or zero.stage != 3:
        return
    if split.model > 1:
        yield Problem(name, "does not work with tensor parallelism", "set model-parallel-size: 1")
    elif split.pipe > 1:
        # torch makes groups for each module, in which all ranks take part, but stages have other modules.
        what = "does not work with pipeline parallelism"
        yield Problem(name, what, "set it to 1, or set pipe-parallel-size: 1")
    elif split.data % size:
        what = f"does not divide the data-parallel size {split.data}"
        yield Problem(name, what, f"use a divisor of {split.data}")

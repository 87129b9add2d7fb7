"""What may be tried: ZeRO stages and micro-batches and, unless `fast`, recomputation and overlap."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neox_launcher.config import Resolved
from neox_launcher.config.shapes import Layout, Shape, layout_of
from neox_launcher.config.suggest import (
    USABLE_MEMORY,
    Cluster,
    largest_memory,
    seconds_per_iteration,
    zero_stages,
)

__all__ = ["Candidate", "Experiment", "search_space"]

_LARGEST_MICRO_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Settings that are tried together.

    Args:
        zero_stage: of the optimizer.
        micro_batch: samples of a device at once.
        accumulation: micro-batches of an update.
        checkpoint_activations: whether layers are recomputed; None leaves it as configured.
        overlap_comm: whether gradients are reduced during the backward pass; None leaves it as configured.
        model_parallel_size: devices that share each layer; None leaves it as configured.
    """

    zero_stage: int
    micro_batch: int
    accumulation: int
    checkpoint_activations: bool | None = None
    overlap_comm: bool | None = None
    model_parallel_size: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Parameter to value."""
        found = {
            "zero_optimization.stage": self.zero_stage,
            "zero_optimization.overlap_comm": self.overlap_comm,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "checkpoint_activations": self.checkpoint_activations,
            "model_parallel_size": self.model_parallel_size,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def name(self) -> str:
        """For files, as in `zero1-micro4-accumulate2`."""
        parts = [f"zero{self.zero_stage}", f"micro{self.micro_batch}", f"accumulate{self.accumulation}"]
        recompute = self.checkpoint_activations
        parts += [] if recompute is None else [_switch("recompute", recompute)]
        parts += [] if self.overlap_comm is None else [_switch("overlap", self.overlap_comm)]
        parts += [] if self.model_parallel_size is None else [f"model{self.model_parallel_size}"]
        return "-".join(parts)

    @property
    def kind(self) -> "Experiment":
        """All but the batch: of one kind, a larger micro-batch needs more memory."""
        return replace(self, micro_batch=0, accumulation=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An experiment and what the formulas of `neox-config suggest` say of it.

    Args:
        experiment: what would be tried.
        seconds: of an update; good for putting candidates in order.
        samples: of an update.
    """

    experiment: Experiment
    seconds: float
    samples: int

    def merit(self, metric: str) -> float:
        """More is better: an update's time, or samples per second, to which operations are proportional."""
        return -self.seconds if metric == "latency" else self.samples / self.seconds


def search_space(
    resolved: Resolved, shape: Shape, cluster: Cluster, *, device_memory: int | None
) -> list[Candidate]:
    """Every experiment, by stage; micro-batches rising.

    A `train_batch_size` that was given stays, and the accumulation follows from it; otherwise the
    accumulation stays, and the batch grows with the micro-batch.

    Args:
        resolved: the configuration, with its autotuning block, on the devices that it will use.
        shape: its model.
        cluster: its devices, as far as their speed goes.
        device_memory: bytes; None where nobody knows, so that trials grow from the configured micro-batch.
    """
    found = []
    batches = list(_batches(resolved))
    for kind in _kinds(resolved):
        judged = [_judge(kind, batch, resolved, shape, cluster) for batch in batches]
        found += _chosen(judged, resolved, device_memory)
    return found


def _kinds(resolved: Resolved) -> Iterator[Experiment]:
    """One per ZeRO stage, and more of them where more than stages may be varied."""
    config, derived = resolved.config, resolved.derived
    tuning = config.autotuning.autotuning
    stages = zero_stages(
        layout_of(resolved), copies=derived.data_parallel_size, has_pipeline=derived.uses_pipeline
    )
    given_size = tuning.mp_size if "autotuning.mp_size" in config.sources else None
    for stage in stages:
        recomputing = (None,) if tuning.fast else (False, True)
        overlapping = (None,) if tuning.fast or stage == 0 else (False, True)
        for recompute, overlap in itertools.product(recomputing, overlapping):
            yield Experiment(
                zero_stage=stage,
                micro_batch=0,
                accumulation=0,
                checkpoint_activations=recompute,
                overlap_comm=overlap,
                model_parallel_size=given_size,
            )


def _batches(resolved: Resolved) -> Iterator[tuple[int, int]]:
    """Micro-batch and accumulation, rising, within the limit for the whole batch."""
    training, derived = resolved.config.training, resolved.derived
    most = resolved.config.autotuning.autotuning.max_train_batch_size
    copies = derived.data_parallel_size
    if training.train_batch_size is not None:
        share = training.train_batch_size // copies
        sizes = [(size, share // size) for size in range(1, share + 1) if share % size == 0]
    else:
        doubled = {derived.micro_batch_size * 2**power for power in range(8)}
        powers = {2**power for power in range(8)}
        largest = max(_LARGEST_MICRO_BATCH, derived.micro_batch_size)
        sizes = [(size, derived.accumulation) for size in sorted(doubled | powers) if size <= largest]
    for micro_batch, accumulation in sizes:
        if most is None or micro_batch * accumulation * copies <= most:
            yield micro_batch, accumulation


def _judge(
    kind: Experiment, batch: tuple[int, int], resolved: Resolved, shape: Shape, cluster: Cluster
) -> tuple[Candidate, int]:
    """A candidate, and the bytes that it needs on the fullest device."""
    experiment = replace(kind, micro_batch=batch[0], accumulation=batch[1])
    layout = _layout(experiment, resolved)
    seconds = seconds_per_iteration(shape, layout, cluster)
    candidate = Candidate(experiment=experiment, seconds=seconds, samples=layout.samples)
    return candidate, largest_memory(shape, layout).total


def _layout(experiment: Experiment, resolved: Resolved) -> Layout:
    like = layout_of(resolved)
    segment = like.segment_layers
    if experiment.checkpoint_activations is not None:
        layers = resolved.config.activation_checkpointing.checkpoint_num_layers
        segment = layers if experiment.checkpoint_activations else None
    configured = resolved.config.zero.zero_optimization.overlap_comm
    overlaps = configured if experiment.overlap_comm is None else experiment.overlap_comm
    return replace(
        like,
        zero_stage=experiment.zero_stage,
        micro_batch=experiment.micro_batch,
        accumulation=experiment.accumulation,
        segment_layers=segment,
        has_second_bucket=experiment.zero_stage == 3 if overlaps is None else overlaps,
    )


def _chosen(
    judged: Sequence[tuple[Candidate, int]], resolved: Resolved, device_memory: int | None
) -> list[Candidate]:
    """The fastest that fit; where nobody knows what fits, the configured micro-batch and those after it."""
    tuning = resolved.config.autotuning.autotuning
    if device_memory is not None:
        usable = device_memory * USABLE_MEMORY
        fitting = [candidate for candidate, needed in judged if needed <= usable]
        ranked = sorted(fitting, key=lambda one: one.merit(tuning.metric), reverse=True)
    else:
        start = resolved.derived.micro_batch_size
        candidates = [candidate for candidate, _ in judged]
        ranked = sorted(candidates, key=lambda one: _distance(one.experiment.micro_batch, start))
    kept = ranked[: tuning.num_tuning_micro_batch_sizes]
    return sorted(kept, key=lambda one: one.experiment.micro_batch)


def _distance(size: int, start: int) -> tuple[bool, int]:
    """Upwards from the start first, then downwards."""
    return size < start, abs(size - start)


def _switch(name: str, is_on: bool) -> str:
    return name if is_on else f"no-{name}"

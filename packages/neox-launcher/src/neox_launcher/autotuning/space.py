"""The search space: ZeRO stages and micro-batches and, unless `fast`, recomputation and overlap."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neox_config import Resolved
from neox_config.estimate.setup import Setup
from neox_config.estimate.suggest import (
    USABLE_MEMORY,
    Cluster,
    largest_memory,
    seconds_per_iteration,
    variants,
)

__all__ = ["Candidate", "Experiment", "search_space"]

_LARGEST_MICRO_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Settings of one trial.

    Args:
        zero_stage: ZeRO stage.
        micro_batch: samples per device and micro-batch.
        accumulation: micro-batches per update.
        checkpoint_activations: whether to recompute activations; None for the configured value.
        overlap_comm: whether to reduce gradients during the backward pass; None for the configured value.
        model_parallel_size: devices that share each layer; None for the configured value.
    """

    zero_stage: int
    micro_batch: int
    accumulation: int
    checkpoint_activations: bool | None = None
    overlap_comm: bool | None = None
    model_parallel_size: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Parameter name to value."""
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
        """Name for files, such as `zero1-micro4-accumulate2`."""
        parts = [f"zero{self.zero_stage}", f"micro{self.micro_batch}", f"accumulate{self.accumulation}"]
        recompute = self.checkpoint_activations
        parts += [] if recompute is None else [_switch("recompute", recompute)]
        parts += [] if self.overlap_comm is None else [_switch("overlap", self.overlap_comm)]
        parts += [] if self.model_parallel_size is None else [f"model{self.model_parallel_size}"]
        return "-".join(parts)

    @property
    def kind(self) -> "Experiment":
        """Experiment without its batch sizes: within a kind, memory grows with the micro-batch."""
        return replace(self, micro_batch=0, accumulation=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An experiment with its estimates from the formulas of `neox-config suggest`.

    Args:
        experiment: settings of the trial.
        seconds: estimated time per update; accurate enough to rank candidates.
        samples: samples per update.
    """

    experiment: Experiment
    seconds: float
    samples: int

    def merit(self, metric: str) -> float:
        """Return a score, larger is better: negative time, or samples per second (also for `flops`)."""
        return -self.seconds if metric == "latency" else self.samples / self.seconds


def search_space(
    resolved: Resolved, like: Setup, cluster: Cluster, *, device_memory: int | None
) -> list[Candidate]:
    """Return all candidates by stage, with ascending micro-batches.

    With a given `train_batch_size`, the accumulation is derived from it; otherwise the accumulation is
    constant, and the train batch size grows with the micro-batch.

    Args:
        resolved: configuration with its autotuning block, for the devices of the job.
        like: what is estimated for it.
        cluster: speed of the devices.
        device_memory: memory of a device in bytes; None if unknown, to start at the configured micro-batch.
    """
    by_kind: dict[Experiment, list[tuple[Candidate, int]]] = {}
    for setup in _setups(resolved, like):
        experiment = _experiment(setup, resolved)
        seconds = seconds_per_iteration(setup, cluster)
        candidate = Candidate(experiment=experiment, seconds=seconds, samples=setup.samples)
        needed = largest_memory(setup).total
        by_kind.setdefault(experiment.kind, []).append((candidate, needed))
    return [found for judged in by_kind.values() for found in _chosen(judged, resolved, device_memory)]


def _setups(resolved: Resolved, like: Setup) -> Iterator[Setup]:
    """Yield every setup to consider, with ascending micro-batches."""
    is_fast = resolved.config.autotuning.autotuning.fast
    configured = (like.run.recomputation.segment, like.run.recomputation.attention)
    section = resolved.config.activation_checkpointing
    is_selective = section.checkpoint_granularity == "selective"
    recomputed = (None, True) if is_selective else (section.checkpoint_num_layers, False)
    return variants(
        like,
        batches=_batches(resolved),
        recomputations=(configured,) if is_fast else ((None, False), recomputed),
        overlaps=lambda zero: (
            (False, True) if _varies_overlap(resolved, zero) else (like.run.gradients.overlaps,)
        ),
    )


def _varies_overlap(resolved: Resolved, zero_stage: int) -> bool:
    return not resolved.config.autotuning.autotuning.fast and zero_stage > 0


def _experiment(setup: Setup, resolved: Resolved) -> Experiment:
    """Return the settings that give the setup; what is not varied keeps its configured value."""
    tuning = resolved.config.autotuning.autotuning
    zero, batch = setup.run.layout.zero, setup.run.batch
    return Experiment(
        zero_stage=zero,
        micro_batch=batch.micro,
        accumulation=batch.accumulation,
        checkpoint_activations=None if tuning.fast else setup.recomputes,
        overlap_comm=setup.has_second_bucket if _varies_overlap(resolved, zero) else None,
        model_parallel_size=tuning.mp_size if "autotuning.mp_size" in resolved.config.sources else None,
    )


def _batches(resolved: Resolved) -> Iterator[tuple[int, int]]:
    """Yield micro-batch and accumulation in ascending order, within the limit of the train batch size."""
    training, batch = resolved.config.training, resolved.run.batch
    most = resolved.config.autotuning.autotuning.max_train_batch_size
    copies = resolved.run.layout.data
    if training.train_batch_size is not None:
        share = training.train_batch_size // copies
        sizes = [(size, share // size) for size in range(1, share + 1) if share % size == 0]
    else:
        doubled = {batch.micro * 2**power for power in range(8)}
        powers = {2**power for power in range(8)}
        largest = max(_LARGEST_MICRO_BATCH, batch.micro)
        sizes = [(size, batch.accumulation) for size in sorted(doubled | powers) if size <= largest]
    for micro_batch, accumulation in sizes:
        if most is None or micro_batch * accumulation * copies <= most:
            yield micro_batch, accumulation


def _chosen(
    judged: Sequence[tuple[Candidate, int]], resolved: Resolved, device_memory: int | None
) -> list[Candidate]:
    """Return the fastest candidates that fit; with unknown memory, the configured micro-batch and above."""
    tuning = resolved.config.autotuning.autotuning
    if device_memory is not None:
        usable = device_memory * USABLE_MEMORY
        fitting = [candidate for candidate, needed in judged if needed <= usable]
        ranked = sorted(fitting, key=lambda one: one.merit(tuning.metric), reverse=True)
    else:
        start = resolved.run.batch.micro
        candidates = [candidate for candidate, _ in judged]
        # From the start upwards, then downwards.
        ranked = sorted(
            candidates,
            key=lambda one: (one.experiment.micro_batch < start, abs(one.experiment.micro_batch - start)),
        )
    kept = ranked[: tuning.num_tuning_micro_batch_sizes]
    return sorted(kept, key=lambda one: one.experiment.micro_batch)


def _switch(name: str, is_on: bool) -> str:
    return name if is_on else f"no-{name}"

"""The fastest layouts that fit: every feasible one is tried, by the formulas of `estimate`.

A layout's time is that of its operations at the speed that the devices attain, of reading weights and moving
activations between them, stretched by the pipeline's bubble, and of the communication that does not hide
behind them: tensor-parallel and pipeline messages never do, ZeRO 2 and 3 reduce and gather while the layers
run, stages 0 and 1 only after the last of them. It is meant for putting layouts in order, not for promising
a date.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from neox_launcher.config.estimate import (
    Memory,
    activation_bytes_per_layer,
    bubble_share,
    communication_bytes,
    device_memory,
    flops_per_token,
    local_parameters,
)
from neox_launcher.config.shapes import Layout, Shape

__all__ = [
    "ATTAINED_TFLOPS",
    "USABLE_MEMORY",
    "Cluster",
    "Suggestion",
    "largest_memory",
    "seconds_per_iteration",
    "suggest",
    "zero_stages",
]

# Half of an A100's data sheet, which is usual for large matrix products.
ATTAINED_TFLOPS = 150.0
# Left to the allocator, which cannot use every gap.
USABLE_MEMORY = 0.94
# A layer's kernels cannot be started faster than this, forward and backward pass together, however small
# they are: about 40 of them at 5 microseconds.
LAYER_START_SECONDS = 2e-4
# Bytes that an update of one parameter reads and writes: gradient, master weight and two moments.
UPDATE_BYTES = 32
# A kept activation is written, read, and has a gradient that is written and read; a weight is read in both
# passes (twice in the backward one), and its gradient is read and written.
ACTIVATION_MOVES = 4
WEIGHT_MOVES = 5
_LARGEST_MICRO_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices.

    Args:
        memory: bytes of a device.
        tflops: what a device attains in large matrix products.
        device_bandwidth: bytes per second between a device and its own memory.
        host_bandwidth: bytes per second that a device sends to others of its host.
        network_bandwidth: bytes per second that a device sends to other hosts.
    """

    devices: int
    memory: int
    devices_per_host: int = 8
    tflops: float = ATTAINED_TFLOPS
    device_bandwidth: float = 1.5e12
    host_bandwidth: float = 200e9
    network_bandwidth: float = 20e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A layout that fits, with the memory of its fullest device and its time."""

    layout: Layout
    memory: Memory
    seconds: float


def suggest(shape: Shape, cluster: Cluster, *, samples: int, like: Layout) -> list[Suggestion]:
    """For each way to split the model that fits, the fastest way to run it; fastest first.

    Args:
        shape: the model.
        cluster: the devices.
        samples: of one update; kept exactly.
        like: what the layouts share with it: precision, optimizer, offloading, bucket sizes.
    """
    best: dict[tuple[int, int], Suggestion] = {}
    for layout in _layouts(shape, cluster, samples, like):
        memory = largest_memory(shape, layout)
        if memory.total > cluster.memory * USABLE_MEMORY:
            continue
        found = Suggestion(
            layout=layout, memory=memory, seconds=seconds_per_iteration(shape, layout, cluster)
        )
        split = (layout.model_parallel, layout.stages)
        if split not in best or found.seconds < best[split].seconds:
            best[split] = found
    return sorted(best.values(), key=lambda suggestion: suggestion.seconds)


def seconds_per_iteration(shape: Shape, layout: Layout, cluster: Cluster) -> float:
    """Time of one update."""
    flops = flops_per_token(shape, is_recomputed=layout.segment_layers is not None)
    computing = flops * shape.seq_length * layout.samples / (layout.devices * cluster.tflops * 1e12)
    starting = LAYER_START_SECONDS * layout.accumulation * shape.num_layers / layout.stages
    busy = max(computing, starting) + _moving_seconds(shape, layout, cluster)
    sent = communication_bytes(shape, layout)
    # Ranks are numbered tensor-parallel first, then data parallel, then stages.
    copies_share_a_host = layout.model_parallel * layout.data_parallel <= cluster.devices_per_host
    stages_share_a_host = layout.devices <= cluster.devices_per_host
    data = sent.data / (cluster.host_bandwidth if copies_share_a_host else cluster.network_bandwidth)
    pipe = sent.pipe / (cluster.host_bandwidth if stages_share_a_host else cluster.network_bandwidth)
    exposed = max(0.0, data - busy) if layout.zero_stage >= 2 else data
    running = busy + sent.model / cluster.host_bandwidth + pipe
    return running / (1 - bubble_share(layout)) + exposed + _update_seconds(shape, layout, cluster)


def _moving_seconds(shape: Shape, layout: Layout, cluster: Cluster) -> float:
    """Time in which the device waits for its own memory: per micro-batch, all weights and activations."""
    weights = max(local_parameters(shape, layout, stage) for stage in {0, layout.stages - 1})
    kinds = Counter(shape.attention_types)
    kept = sum(number * activation_bytes_per_layer(shape, layout, kind) for kind, number in kinds.items())
    moved = WEIGHT_MOVES * layout.element_bytes * weights + ACTIVATION_MOVES * kept / layout.stages
    return layout.accumulation * moved / cluster.device_bandwidth


def _update_seconds(shape: Shape, layout: Layout, cluster: Cluster) -> float:
    states = replace(layout, optimizer_on_host=False)
    kept = max(device_memory(shape, states, stage).optimizer for stage in {0, layout.stages - 1})
    per_parameter = 4 * (layout.optimizer_states + 1)
    return kept / per_parameter * UPDATE_BYTES / cluster.device_bandwidth


def largest_memory(shape: Shape, layout: Layout) -> Memory:
    """Of the first and the last stage, which hold the embedding, most activations, and the head."""
    memories = [device_memory(shape, layout, stage) for stage in {0, layout.stages - 1}]
    return max(memories, key=lambda memory: memory.total)


def _layouts(shape: Shape, cluster: Cluster, samples: int, like: Layout) -> Iterator[Layout]:
    """Every layout that the rules of the configuration allow and that uses all devices."""
    for ranks, stages in _splits(shape, cluster):
        copies = cluster.devices // (ranks * stages)
        if samples % copies:
            continue
        for micro_batch, accumulation in _micro_batches(samples // copies):
            for zero_stage in zero_stages(like, copies=copies, has_pipeline=stages > 1):
                for segment_layers in (None, like.segment_layers or 1):
                    yield replace(
                        like,
                        model_parallel=ranks,
                        stages=stages,
                        data_parallel=copies,
                        zero_stage=zero_stage,
                        micro_batch=micro_batch,
                        accumulation=accumulation,
                        segment_layers=segment_layers,
                        has_second_bucket=zero_stage == 3,
                    )


def _splits(shape: Shape, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Tensor-parallel sizes within a host, and numbers of stages that share the layers evenly."""
    for ranks in _divisors(min(cluster.devices_per_host, cluster.devices)):
        shared_out = (cluster.devices, shape.kv_heads or shape.heads, shape.intermediate_size)
        if any(number % ranks for number in shared_out):
            continue
        for stages in _divisors(shape.num_layers):
            if cluster.devices % (ranks * stages) == 0:
                yield ranks, stages


def _micro_batches(samples: int) -> Iterator[tuple[int, int]]:
    micro_batch = 1
    while micro_batch <= min(samples, _LARGEST_MICRO_BATCH) and samples % micro_batch == 0:
        yield micro_batch, samples // micro_batch
        micro_batch *= 2


def zero_stages(like: Layout, *, copies: int, has_pipeline: bool) -> tuple[int, ...]:
    """Stages 2 and 3 need the plain model, sharing needs copies, offloading needs what is offloaded.

    Args:
        like: says what is offloaded.
        copies: of the model, among which ZeRO shares.
        has_pipeline: the pipeline engine runs the model.
    """
    if like.parameters_on_host:
        return () if has_pipeline else (3,)
    if like.optimizer_on_host:
        return (1,) if has_pipeline else (1, 2, 3)
    if copies == 1:
        return (0,)
    return (0, 1) if has_pipeline else (0, 1, 2, 3)


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)

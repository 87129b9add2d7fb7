"""Suggest the fastest layouts that fit in memory, by estimating all feasible ones.

The time of a layout is the time of its operations at the attained speed of the devices, of reading weights
and moving activations, increased by the pipeline bubble, plus communication that is not overlapped:
tensor-parallel and pipeline messages are never overlapped, ZeRO 2 and 3 communicate while the layers run, and
stages 0 and 1 after the last layer. It is meant for comparing layouts, not for predicting the duration of
training.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from neox_config.estimate import (
    Memory,
    activation_bytes_per_layer,
    bubble_share,
    communication_bytes,
    device_memory,
    flops_per_token,
    local_parameters,
)
from neox_config.estimate.shapes import Layout, Shape

__all__ = [
    "ATTAINED_TFLOPS",
    "USABLE_MEMORY",
    "Cluster",
    "Suggestion",
    "largest_memory",
    "seconds_per_iteration",
    "suggest",
    "variants",
]

# Half of the peak of an A100, which is typical for large matrix products.
ATTAINED_TFLOPS = 150.0
# Fraction of device memory that can be used; the rest is lost to fragmentation.
USABLE_MEMORY = 0.94
# Minimum time to launch the kernels of a layer in both passes: about 40 kernels at 5 microseconds.
LAYER_START_SECONDS = 2e-4
# Bytes read and written by the update of one parameter: gradient, master weight and two moments.
UPDATE_BYTES = 32
# A stored activation is written and read, and so is its gradient; a weight is read once in the forward and
# twice in the backward pass, and its gradient is read and written.
ACTIVATION_MOVES = 4
WEIGHT_MOVES = 5
_LARGEST_MICRO_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices.

    Args:
        memory: memory of a device in bytes.
        tflops: attained speed of a device in large matrix products, in TFLOP/s.
        device_bandwidth: bytes per second between a device and its memory.
        host_bandwidth: bytes per second that a device sends to devices on the same host.
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
    """A layout that fits in memory, with the memory of its fullest device and its time per update."""

    layout: Layout
    memory: Memory
    seconds: float


def suggest(shape: Shape, cluster: Cluster, *, samples: int, like: Layout) -> list[Suggestion]:
    """Return the fastest layout for each way to split the model that fits in memory, fastest first.

    Args:
        shape: the model.
        cluster: the devices.
        samples: samples per update, kept exactly.
        like: layout that provides precision, optimizer, offloading and bucket sizes.
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
    """Return the estimated time per update in seconds."""
    flops = flops_per_token(
        shape,
        is_recomputed=layout.segment_layers is not None,
        recomputes_attention=layout.recomputes_attention,
    )
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
    """Return the time in seconds for moving weights and activations of all micro-batches in device memory."""
    weights = max(local_parameters(shape, layout, stage) for stage in {0, layout.stages - 1})
    kinds = Counter(shape.attention_types)
    # What is recomputed is written and read, too.
    made = replace(layout, recomputes_attention=False)
    kept = sum(number * activation_bytes_per_layer(shape, made, kind) for kind, number in kinds.items())
    moved = WEIGHT_MOVES * layout.element_bytes * weights + ACTIVATION_MOVES * kept / layout.stages
    return layout.accumulation * moved / cluster.device_bandwidth


def _update_seconds(shape: Shape, layout: Layout, cluster: Cluster) -> float:
    states = replace(layout, optimizer_on_host=False)
    kept = max(device_memory(shape, states, stage).optimizer for stage in {0, layout.stages - 1})
    per_parameter = 4 * (layout.optimizer_states + 1)
    return kept / per_parameter * UPDATE_BYTES / cluster.device_bandwidth


def largest_memory(shape: Shape, layout: Layout, *, device: str = "cuda") -> Memory:
    """Return the memory of the first or the last stage, whichever is larger, on a type of device."""
    memories = [device_memory(shape, layout, stage, device=device) for stage in {0, layout.stages - 1}]
    return max(memories, key=lambda memory: memory.total)


def _layouts(shape: Shape, cluster: Cluster, samples: int, like: Layout) -> Iterator[Layout]:
    """Yield every layout that the rules of the configuration allow and that uses all devices."""
    for ranks, stages in _splits(shape, cluster):
        copies = cluster.devices // (ranks * stages)
        if samples % copies:
            continue
        split = replace(like, model_parallel=ranks, stages=stages, data_parallel=copies)
        yield from variants(
            split,
            has_pipeline=stages > 1,
            batches=_micro_batches(samples // copies),
            recomputations=((None, False), (None, True), (like.segment_layers or 1, False)),
            overlaps=lambda zero_stage: (zero_stage == 3,),
        )


def variants(
    like: Layout,
    *,
    has_pipeline: bool,
    batches: Iterable[tuple[int, int]],
    recomputations: Iterable[tuple[int | None, bool]],
    overlaps: Callable[[int], Iterable[bool]],
) -> Iterator[Layout]:
    """Yield the layouts that split the model in the same way, with every possible ZeRO stage.

    Args:
        like: layout that provides everything that is not varied.
        has_pipeline: True if the pipeline engine runs the model.
        batches: micro-batch sizes, each with its accumulation.
        recomputations: values of `Layout.segment_layers` and `Layout.recomputes_attention`.
        overlaps: given the ZeRO stage, whether gradients are reduced during the backward pass.
    """
    stages = _zero_stages(like, copies=like.data_parallel, has_pipeline=has_pipeline)
    for (micro_batch, accumulation), zero_stage, recomputation in product(batches, stages, recomputations):
        segment_layers, recomputes_attention = recomputation
        for has_second_bucket in overlaps(zero_stage):
            yield replace(
                like,
                zero_stage=zero_stage,
                micro_batch=micro_batch,
                accumulation=accumulation,
                segment_layers=segment_layers,
                recomputes_attention=recomputes_attention,
                has_second_bucket=has_second_bucket,
            )


def _splits(shape: Shape, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Yield tensor-parallel sizes within a host, and numbers of stages that divide the layers evenly."""
    for ranks in _divisors(min(cluster.devices_per_host, cluster.devices)):
        shared_out = (cluster.devices, shape.kv_heads or shape.heads, shape.mlp_width)
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


def _zero_stages(like: Layout, *, copies: int, has_pipeline: bool) -> tuple[int, ...]:
    """Return the possible ZeRO stages of a layout.

    Args:
        like: layout that defines what is offloaded.
        copies: data-parallel size.
        has_pipeline: True if the pipeline engine runs the model.
    """
    if like.parameters_on_host:
        stages: tuple[int, ...] = (3,)
    elif like.optimizer_on_host:
        stages = (1, 2, 3)
    else:
        stages = (0,) if copies == 1 else (0, 1, 2, 3)
    # Pipelines with stages 2 and 3, which communicate in every micro-batch, are in no published run.
    return tuple(stage for stage in stages if stage <= 1 or not has_pipeline)


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)

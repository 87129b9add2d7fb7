"""Suggest the fastest layouts that fit in memory, by estimating all feasible ones.

The time of a layout is the time of its operations at the attained speed of the devices, of reading weights
and moving activations, increased by the pipeline bubble, plus communication that is not overlapped: messages
of tensor parallelism, expert parallelism and pipelines are never overlapped, ZeRO 2 and 3 communicate while
the layers run, and stages 0 and 1 after the last layer. It is meant for comparing layouts, not for predicting
the duration of training.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from neox_config.estimate import (
    Memory,
    activation_bytes_per_layer,
    bubble_share,
    communication_bytes,
    device_memory,
    flops_per_token,
    local_parameters,
)
from neox_config.estimate.parameters import number_of_each
from neox_config.estimate.setup import Setup
from neox_config.spec.model import Experts

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

    setup: Setup
    memory: Memory
    seconds: float


def suggest(like: Setup, cluster: Cluster, *, samples: int) -> list[Suggestion]:
    """Return the fastest layout for each way to split the model that fits in memory, fastest first.

    Args:
        like: setup that provides everything that is not varied.
        cluster: the devices.
        samples: samples per update, kept exactly.
    """
    best: dict[tuple[int, int], Suggestion] = {}
    for setup in _setups(like, cluster, samples):
        memory = largest_memory(setup)
        if memory.total > cluster.memory * USABLE_MEMORY:
            continue
        found = Suggestion(setup=setup, memory=memory, seconds=seconds_per_iteration(setup, cluster))
        split = (setup.run.layout.tensor, setup.run.layout.stages)
        if split not in best or found.seconds < best[split].seconds:
            best[split] = found
    return sorted(best.values(), key=lambda suggestion: suggestion.seconds)


def seconds_per_iteration(setup: Setup, cluster: Cluster) -> float:
    """Return the estimated time per update in seconds."""
    model, layout, batch = setup.model, setup.run.layout, setup.run.batch
    flops = flops_per_token(
        model,
        entries=setup.entries,
        length=batch.length,
        is_recomputed=setup.run.recomputation.segment is not None,
        recomputes_attention=setup.run.recomputation.attention,
    )
    computing = flops * batch.length * setup.samples / (setup.devices * cluster.tflops * 1e12)
    starting = LAYER_START_SECONDS * batch.accumulation * len(model.layers) / layout.stages
    busy = max(computing, starting) + _moving_seconds(setup, cluster)
    sent = communication_bytes(setup)
    # Ranks are numbered tensor-parallel first, then data parallel, then stages.
    copies_share_a_host = layout.tensor * layout.data <= cluster.devices_per_host
    stages_share_a_host = setup.devices <= cluster.devices_per_host
    data = sent.data / (cluster.host_bandwidth if copies_share_a_host else cluster.network_bandwidth)
    pipe = sent.pipe / (cluster.host_bandwidth if stages_share_a_host else cluster.network_bandwidth)
    experts_share_a_host = layout.tensor * layout.experts <= cluster.devices_per_host
    experts = sent.experts / (cluster.host_bandwidth if experts_share_a_host else cluster.network_bandwidth)
    exposed = max(0.0, data - busy) if layout.zero >= 2 else data
    running = busy + sent.model / cluster.host_bandwidth + pipe + experts
    return running / (1 - bubble_share(setup)) + exposed + _update_seconds(setup, cluster)


def _moving_seconds(setup: Setup, cluster: Cluster) -> float:
    """Return the time in seconds for moving weights and activations of all micro-batches in device memory."""
    model, stages = setup.model, setup.run.layout.stages
    weights = max(local_parameters(setup, stage) for stage in {0, stages - 1})
    # What is recomputed is written and read, too.
    made = setup.changed(recomputation={"attention": False})
    kinds = number_of_each(model, range(len(model.layers)))
    kept = sum(number * activation_bytes_per_layer(made, kind) for kind, number in kinds)
    moved = WEIGHT_MOVES * setup.element_bytes * weights + ACTIVATION_MOVES * kept / stages
    return setup.run.batch.accumulation * moved / cluster.device_bandwidth


def _update_seconds(setup: Setup, cluster: Cluster) -> float:
    on_device = replace(setup, on_host=False)
    kept = max(device_memory(on_device, stage).optimizer for stage in {0, setup.run.layout.stages - 1})
    per_parameter = 4 * (2 if setup.averages_weights else 1) + setup.state_bytes * setup.states
    return kept / per_parameter * UPDATE_BYTES / cluster.device_bandwidth


def largest_memory(setup: Setup, *, device: str = "cuda") -> Memory:
    """Return the memory of the first or the last stage, whichever is larger, on a type of device."""
    stages = {0, setup.run.layout.stages - 1}
    return max(
        (device_memory(setup, stage, device=device) for stage in stages), key=lambda memory: memory.total
    )


def _setups(like: Setup, cluster: Cluster, samples: int) -> Iterator[Setup]:
    """Yield every layout that the rules of the configuration allow and that uses all devices."""
    for ranks, stages in _splits(like, cluster):
        copies = cluster.devices // (ranks * stages)
        if samples % copies:
            continue
        split = {"tensor": ranks, "stages": stages, "data": copies, "is_pipeline": stages > 1}
        for experts in _expert_sizes(like, copies):
            yield from variants(
                like.changed(layout=split | {"experts": experts}),
                batches=_micro_batches(samples // copies),
                recomputations=((None, False), (None, True), (like.run.recomputation.segment or 1, False)),
                overlaps=lambda zero: (None,),
            )


def _expert_sizes(like: Setup, copies: int) -> Iterator[int]:
    """Return the numbers of data-parallel ranks that can divide the experts."""
    numbers = {each.channel.number for each in like.model.layers if isinstance(each.channel, Experts)}
    can_divide = numbers and not like.optimizer.requires_whole_weights
    return _divisors(gcd(copies, *numbers) if can_divide else 1)


def variants(
    like: Setup,
    *,
    batches: Iterable[tuple[int, int]],
    recomputations: Iterable[tuple[int | None, bool]],
    overlaps: Callable[[int], Iterable[bool | None]],
) -> Iterator[Setup]:
    """Yield the setups that split the model in the same way, with every possible ZeRO stage.

    Args:
        like: setup that provides everything that is not varied.
        batches: micro-batch sizes, each with its accumulation.
        recomputations: values of `Recomputation.segment` and `Recomputation.attention`.
        overlaps: values of `Gradients.overlaps` at a ZeRO stage above 0.
    """
    given = like.run.gradients.overlaps
    for (micro, accumulation), zero, (segment, attention) in product(
        batches, _zero_stages(like), recomputations
    ):
        for overlaps_now in overlaps(zero) if zero else (given,):
            yield like.changed(
                layout={"zero": zero},
                batch={"micro": micro, "accumulation": accumulation},
                recomputation={"segment": segment, "attention": attention},
                gradients={"overlaps": overlaps_now},
            )


def _splits(like: Setup, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Yield tensor-parallel sizes within a host, and numbers of stages that divide the layers evenly."""
    for ranks in _divisors(min(cluster.devices_per_host, cluster.devices)):
        if any(number % ranks for number in (cluster.devices, *like.divided)):
            continue
        for stages in _divisors(len(like.model.layers)):
            if cluster.devices % (ranks * stages) == 0:
                yield ranks, stages


def _micro_batches(samples: int) -> Iterator[tuple[int, int]]:
    micro_batch = 1
    while micro_batch <= min(samples, _LARGEST_MICRO_BATCH) and samples % micro_batch == 0:
        yield micro_batch, samples // micro_batch
        micro_batch *= 2


def _zero_stages(like: Setup) -> tuple[int, ...]:
    """Return the possible ZeRO stages of a layout, which depend on what is offloaded."""
    if like.weights_on_host:
        stages: tuple[int, ...] = (3,)
    elif like.on_host:
        stages = (1, 2, 3)
    else:
        stages = (0,) if like.run.layout.data == 1 else (0, 1, 2, 3)
    # Pipelines with stages 2 and 3, which communicate in every micro-batch, are in no published run.
    return tuple(stage for stage in stages if stage <= 1 or not like.run.layout.is_pipeline)


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)

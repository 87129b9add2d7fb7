"""Elastic training: choose one batch size that works with many numbers of devices.

A batch size works with a number of model copies if each copy's share is a multiple of one of the micro-batch
sizes. Batches that are a highly composite multiple of a micro-batch size, or of the least common multiple of
all of them, work with the most numbers. Version 0.1 counts devices. Version 0.2 counts whole hosts, supports
model parallelism, and chooses a separate batch size for numbers of hosts that the common one does not fit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from neox_config.pluralize import pluralize
from neox_config.schema.config import NeoXConfig
from neox_config.schema.sections.elasticity import Elasticity

__all__ = [
    "HIGHLY_COMPOSITE",
    "Crowd",
    "ElasticBatch",
    "common_batch",
    "elastic_batch",
    "elastic_devices",
    "without_elasticity",
]

# Numbers with more divisors than any smaller one (OEIS A002182).
HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10_080),
    *(15_120, 20_160, 25_200, 27_720, 45_360, 50_400, 55_440, 83_160, 110_880, 166_320, 221_760, 277_200),
    *(332_640, 498_960, 554_400, 665_280, 720_720, 1_081_080, 1_441_440, 2_162_160),
)
_LISTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticBatch:
    """Batch sizes for a number of devices.

    Args:
        train: samples per update over all devices.
        micro: samples per device and forward pass.
        accumulation: micro-batches per update.
    """

    train: int
    micro: int
    accumulation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """A batch size and the numbers of copies (hosts in version 0.2) that it works with, ascending."""

    batch: int
    counts: tuple[int, ...]


def elastic_batch(elasticity: Elasticity, *, devices: int, devices_per_copy: int = 1) -> ElasticBatch:
    """Return the batch sizes for a number of devices.

    Args:
        elasticity: block of the configuration.
        devices: number of devices of the whole job.
        devices_per_copy: tensor-parallel size.

    Raises:
        ValueError: The block allows no batch size for this number of devices; the message is followed by "; "
            and a remedy.
    """
    crowd, unit = _crowd(elasticity, devices_per_copy)
    copies, most = devices // devices_per_copy, elasticity.max_train_batch_size
    valid = tuple(count * unit for count in crowd.counts)
    batch = crowd.batch * (unit // devices_per_copy)
    if devices not in valid:
        if (
            elasticity.version < 0.2
            or devices % unit
            or not elasticity.min_gpus <= devices <= elasticity.max_gpus
        ):
            near = sorted(valid, key=lambda count: abs(count - devices))[:_LISTED]
            listed = ", ".join(f"{count:,}" for count in sorted(near))
            raise ValueError(f"allows no batch size for {pluralize(devices, 'device')}; use {listed}")
        shares = [size * (most // (size * copies)) for size in elasticity.micro_batch_sizes]
        share = max(shares) if elasticity.prefer_large_batch else min(filter(None, shares), default=0)
        if not share:
            raise ValueError(
                f"allows no batch size for {pluralize(devices, 'device')}: the smallest possible is "
                f"{min(elasticity.micro_batch_sizes) * copies:,}; raise max_train_batch_size"
            )
        batch = share * copies
    fitting = [size for size in elasticity.micro_batch_sizes if batch // copies % size == 0]
    micro = max(fitting) if elasticity.version < 0.2 or elasticity.prefer_large_batch else fitting[0]
    return ElasticBatch(train=batch, micro=micro, accumulation=batch // copies // micro)


def elastic_devices(elasticity: Elasticity, *, devices_per_copy: int = 1, copies: int = 1) -> tuple[int, ...]:
    """Return the numbers of devices that the common batch size works with.

    Args:
        elasticity: the block.
        devices_per_copy: devices that hold a copy of the model.
        copies: divides the number of copies, as `expert_ranks` must.

    Raises:
        ValueError: The block allows no number of devices; the message is followed by "; " and a remedy.
    """
    crowd, unit = _crowd(elasticity, devices_per_copy)
    return tuple(count * unit for count in crowd.counts if count * unit // devices_per_copy % copies == 0)


def without_elasticity(config: NeoXConfig) -> NeoXConfig:
    """Return the configuration without elasticity, for programs that do not use batches."""
    section = config.elasticity.replaced(elasticity=Elasticity())
    return config.model_copy(update={"elasticity": section})


def common_batch(
    micro_batch_sizes: Sequence[int], *, largest: int, fewest: int, most: int, prefer_large: bool
) -> Crowd:
    """Return the batch size that works with the most numbers of copies.

    Args:
        micro_batch_sizes: micro-batch sizes to choose from; every copy uses the same one.
        largest: maximum batch size.
        fewest: minimum number of copies.
        most: maximum number of copies.
        prefer_large: if two batch sizes work with equally many numbers, choose the larger.

    Raises:
        ValueError: No batch size works with any of these numbers of copies.
    """
    crowds = [
        Crowd(batch=batch, counts=_counts(batch, micro_batch_sizes, fewest, most))
        for batch in _candidates(micro_batch_sizes, largest)
    ]
    sign = 1 if prefer_large else -1
    best = max(crowds, key=lambda crowd: (len(crowd.counts), sign * crowd.batch), default=None)
    if best is None or not best.counts:
        raise ValueError(
            "allows no batch size for any number of devices from min_gpus to max_gpus; "
            "raise max_train_batch_size, or lower min_gpus"
        )
    return best


def _crowd(elasticity: Elasticity, devices_per_copy: int) -> tuple[Crowd, int]:
    """Return the common batch size, and the number of devices that each of its counts stands for."""
    if elasticity.version < 0.2:
        unit, copies = 1, 1
        if devices_per_copy > 1:
            raise ValueError("does not support model parallelism in version 0.1; set version: 0.2")
    else:
        unit, copies = elasticity.num_gpus_per_node, elasticity.num_gpus_per_node // devices_per_copy
        if elasticity.num_gpus_per_node % devices_per_copy:
            raise ValueError(
                f"requires whole copies of the model on each host: num_gpus_per_node is {unit}, but a copy "
                f"needs {devices_per_copy} devices; set num_gpus_per_node to a multiple of {devices_per_copy}"
            )
    crowd = common_batch(
        elasticity.micro_batch_sizes,
        largest=elasticity.max_train_batch_size // copies,
        fewest=max(1, -(-elasticity.min_gpus // unit)),
        most=elasticity.max_gpus // unit,
        prefer_large=elasticity.prefer_large_batch,
    )
    return crowd, unit


def _candidates(micro_batch_sizes: Sequence[int], largest: int) -> set[int]:
    """Return the largest highly composite multiple of each size and of their least common multiple."""
    found = set()
    for base in (*micro_batch_sizes, math.lcm(*micro_batch_sizes)):
        fitting = [number for number in HIGHLY_COMPOSITE if number * base <= largest]
        if fitting:
            found.add(base * fitting[-1])
    return found


def _counts(batch: int, micro_batch_sizes: Sequence[int], fewest: int, most: int) -> tuple[int, ...]:
    """Return the numbers of copies for which each copy gets whole micro-batches of one size."""
    found: set[int] = set()
    for share in (batch // size for size in micro_batch_sizes if batch % size == 0):
        for small in (small for small in range(1, math.isqrt(share) + 1) if share % small == 0):
            found |= {small, share // small}
    return tuple(sorted(count for count in found if fewest <= count <= most))

"""Elastic training: one batch size that many numbers of devices can share, and what each does with it.

A batch size suits so many copies of the model when the share of each is a whole number of one of the
micro-batch sizes. Batches that are a highly composite number of micro-batches, or of their least common
multiple, suit the most. Version 0.1 counts devices; version 0.2 counts whole hosts, knows model parallelism,
and gives a number of hosts that no common batch size suits one of its own.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from neox_launcher.config.schema import NeoXConfig
from neox_launcher.config.sections.elasticity import Elasticity

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
    """What a number of devices does.

    Args:
        train: samples of one update over all devices.
        micro: samples that a device handles at once.
        accumulation: micro-batches of one update.
    """

    train: int
    micro: int
    accumulation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """A batch size, and the numbers of copies (of hosts, in version 0.2) that can share it, rising."""

    batch: int
    counts: tuple[int, ...]


def elastic_batch(elasticity: Elasticity, *, devices: int, devices_per_copy: int = 1) -> ElasticBatch:
    """The batch sizes for a number of devices.

    Args:
        elasticity: what is allowed.
        devices: of the whole job.
        devices_per_copy: that share each layer.

    Raises:
        ValueError: the block allows no batch for so many devices; what, and behind "; " the remedy.
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
            raise ValueError(f"allows no batch for {_devices(devices)}; {_nearest(devices, valid)}")
        shares = [size * (most // (size * copies)) for size in elasticity.micro_batch_sizes]
        share = max(shares) if elasticity.prefer_large_batch else min(filter(None, shares), default=0)
        if not share:
            raise ValueError(
                f"allows no batch for {_devices(devices)}: the smallest is "
                f"{min(elasticity.micro_batch_sizes) * copies:,}; raise max_train_batch_size"
            )
        batch = share * copies
    fitting = [size for size in elasticity.micro_batch_sizes if batch // copies % size == 0]
    micro = max(fitting) if elasticity.version < 0.2 or elasticity.prefer_large_batch else fitting[0]
    return ElasticBatch(train=batch, micro=micro, accumulation=batch // copies // micro)


def elastic_devices(elasticity: Elasticity, *, devices_per_copy: int = 1) -> tuple[int, ...]:
    """The numbers of devices that share one batch size.

    Raises:
        ValueError: the block allows none; what, and behind "; " the remedy.
    """
    crowd, unit = _crowd(elasticity, devices_per_copy)
    return tuple(count * unit for count in crowd.counts)


def without_elasticity(config: NeoXConfig) -> NeoXConfig:
    """The same configuration with batch sizes as they are given, for a program that fills no batch."""
    section = config.elasticity.replaced(elasticity=Elasticity())
    return config.model_copy(update={"elasticity": section})


def common_batch(
    micro_batch_sizes: Sequence[int], *, largest: int, fewest: int, most: int, prefer_large: bool
) -> Crowd:
    """The batch size that the most numbers of copies can share.

    Args:
        micro_batch_sizes: of which each copy gets one or more, all of the same size.
        largest: batch that is allowed.
        fewest: copies that count.
        most: copies that count.
        prefer_large: of two batch sizes that suit as many, take the larger.

    Raises:
        ValueError: no batch size suits any of them.
    """
    crowds = [
        Crowd(batch=batch, counts=_counts(batch, micro_batch_sizes, fewest, most))
        for batch in _candidates(micro_batch_sizes, largest)
    ]
    sign = 1 if prefer_large else -1
    best = max(crowds, key=lambda crowd: (len(crowd.counts), sign * crowd.batch), default=None)
    if best is None or not best.counts:
        raise ValueError(
            "allows no batch for any number of devices from min_gpus to max_gpus; "
            "raise max_train_batch_size, or lower min_gpus"
        )
    return best


def _crowd(elasticity: Elasticity, devices_per_copy: int) -> tuple[Crowd, int]:
    """The crowd that the block asks for, and how many devices one of its counts stands for."""
    if elasticity.version < 0.2:
        unit, copies = 1, 1
        if devices_per_copy > 1:
            raise ValueError("knows no model parallelism in version 0.1; set version: 0.2")
    else:
        unit, copies = elasticity.num_gpus_per_node, elasticity.num_gpus_per_node // devices_per_copy
        if elasticity.num_gpus_per_node % devices_per_copy:
            raise ValueError(
                f"needs whole copies of the model on each host: num_gpus_per_node is {unit}, and "
                f"{devices_per_copy} devices hold a copy; set num_gpus_per_node to a multiple of that"
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
    """For each size and for their least common multiple: its largest highly composite multiple."""
    found = set()
    for base in (*micro_batch_sizes, math.lcm(*micro_batch_sizes)):
        fitting = [number for number in HIGHLY_COMPOSITE if number * base <= largest]
        if fitting:
            found.add(base * fitting[-1])
    return found


def _counts(batch: int, micro_batch_sizes: Sequence[int], fewest: int, most: int) -> tuple[int, ...]:
    """Numbers of copies, each of which gets whole micro-batches of one size."""
    found: set[int] = set()
    for size in micro_batch_sizes:
        if batch % size == 0:
            found.update(count for count in _divisors(batch // size) if fewest <= count <= most)
    return tuple(sorted(found))


def _divisors(number: int) -> Iterator[int]:
    for small in range(1, math.isqrt(number) + 1):
        if number % small == 0:
            yield small
            yield number // small


def _devices(count: int) -> str:
    return f"{count:,} device{'' if count == 1 else 's'}"


def _nearest(devices: int, valid: Sequence[int]) -> str:
    near = sorted(sorted(valid, key=lambda count: abs(count - devices))[:_LISTED])
    return f"use {', '.join(f'{count:,}' for count in near)}"

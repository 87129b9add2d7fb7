"""Reads the NVLink topology, and orders GPUs so that pairs joined by NVLink are neighbours."""

import re
from collections.abc import Mapping, Sequence
from functools import cache

from neox_config.errors import LaunchError

__all__ = ["pair_devices", "parse_topology"]

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"GPU(\d+)")
_LINK = re.compile(r"NV(\d+)")
# Devices of one host; bounds the search for the best pairs.
_MOST_DEVICES = 16


def pair_devices(topology: str, devices: Sequence[str]) -> tuple[str, ...]:
    """Return the devices reordered so that those joined by the most NVLinks are next to each other.

    The pairs have the largest total number of links; among equal choices the first in the given order is
    taken. The order does not change if all devices are joined to each other (NVSwitch) or there is no
    NVLink. Pairs are in the order of their first device, followed by devices without a partner, so that
    ranks 0 and 1, 2 and 3, ... are pairs.

    Args:
        topology: output of `nvidia-smi topo -m`.
        devices: device numbers, as in CUDA_VISIBLE_DEVICES; the topology does not contain UUIDs.

    Raises:
        LaunchError: a device is not given by number, or is not in the topology.
    """
    links = parse_topology(topology)
    known = {device for pair in links for device in pair}
    for device in devices:
        if not device.isdigit() or int(device) not in known:
            raise LaunchError(
                f"detect-nvlink-pairs: {device} is not a device number of `nvidia-smi topo -m`; set "
                "CUDA_VISIBLE_DEVICES to device numbers, or leave detect-nvlink-pairs out",
                code="no-device-number",
            )
    if len(devices) > _MOST_DEVICES:
        raise LaunchError(
            f"detect-nvlink-pairs: supports at most {_MOST_DEVICES} devices per host, but there are "
            f"{len(devices)}; leave it out"
        )
    numbers = [int(device) for device in devices]
    weights = {
        (i, j): links.get((one, other), 0)
        for i, one in enumerate(numbers)
        for j, other in enumerate(numbers)
        if i < j
    }
    pairs = _best_pairs(len(numbers), weights)
    paired = {place for pair in pairs for place in pair}
    alone = [place for place in range(len(numbers)) if place not in paired]
    return tuple(devices[place] for pair in pairs for place in pair) + tuple(
        devices[place] for place in alone
    )


def parse_topology(text: str) -> dict[tuple[int, int], int]:
    """Return the number of NVLinks for every pair of GPU numbers; 0 if they are connected otherwise.

    Raises:
        LaunchError: the text contains no matrix of GPUs.
    """
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    header = next((line for line in lines if line and _DEVICE.fullmatch(line[0]) and "X" not in line), [])
    columns = [int(name[3:]) for name in header if _DEVICE.fullmatch(name)]
    links: dict[tuple[int, int], int] = {}
    for line in lines:
        if not line or not _DEVICE.fullmatch(line[0]) or line == header:
            continue
        row = int(line[0][3:])
        for column, cell in zip(columns, line[1:], strict=False):
            match = _LINK.fullmatch(cell)
            links[row, column] = int(match[1]) if match else 0
    if not links:
        raise LaunchError(
            "detect-nvlink-pairs: `nvidia-smi topo -m` prints no matrix of GPUs here; leave it out",
            code="no-matrix",
        )
    return links


def _best_pairs(count: int, weights: Mapping[tuple[int, int], int]) -> tuple[tuple[int, int], ...]:
    """Return disjoint pairs of indices with the largest sum of weights; the first in order among equals."""

    @cache
    def best(free: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        if not free:
            return 0, ()
        first = (free & -free).bit_length() - 1
        rest = free & ~(1 << first)
        found: tuple[int, tuple[tuple[int, int], ...]] | None = None
        for other in range(first + 1, count):
            links = weights[first, other]
            if rest & (1 << other) and links:
                total, pairs = best(rest & ~(1 << other))
                if found is None or total + links > found[0]:
                    found = (total + links, ((first, other), *pairs))
        alone = best(rest)
        return alone if found is None or alone[0] > found[0] else found

    return best((1 << count) - 1)[1]

"""Speeds of GPUs, for estimates of the time of training."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DEVICES", "Device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU in a host with others of its kind, as the vendors' data sheets state it.

    Args:
        memory: bytes of memory.
        peak: operations per second of dense 16-bit matrix products.
        sustained: share of `peak` that its power limit allows in long matrix products.
        memory_bandwidth: bytes per second between the GPU and its memory.
        link_bandwidth: bytes per second that the GPU sends to others in its host.
        network_bandwidth: bytes per second that the GPU's own network adapter sends to other hosts.
    """

    memory: int
    peak: float
    sustained: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float


_A100 = {"peak": 312e12, "sustained": 1.0, "link_bandwidth": 300e9, "network_bandwidth": 25e9}
_HOPPER = {"peak": 989e12, "link_bandwidth": 450e9, "network_bandwidth": 50e9}

# `sustained` of the H100 at 500 W was fitted to published runs (benchmarks/published_runs.py). The others may
# draw 700 W; their clock, and so their speed, is assumed to grow with the cube root of the power.
DEVICES: Mapping[str, Device] = {
    "A100-40": Device(memory=40 * 10**9, memory_bandwidth=1.555e12, **_A100),
    "A100-80": Device(memory=80 * 10**9, memory_bandwidth=2.039e12, **_A100),
    "H100-500W": Device(memory=80 * 10**9, sustained=0.59, memory_bandwidth=3.35e12, **_HOPPER),
    "H100": Device(memory=80 * 10**9, sustained=0.66, memory_bandwidth=3.35e12, **_HOPPER),
    "H200": Device(memory=141 * 10**9, sustained=0.66, memory_bandwidth=4.8e12, **_HOPPER),
}
"""Name -> GPU."""

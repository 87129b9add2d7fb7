"""Pairs of GPUs in the topologies of real machines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neox_config.errors import LaunchError
from neox_launcher.resources.nvlink import pair_devices, parse_topology
from support.refusals import refused

# Two bridges, between neighbours: a workstation with four RTX A6000.
BRIDGES = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV4\tSYS\tSYS\t0-15\t0\t\tN/A
GPU1\tNV4\t X \tSYS\tSYS\t0-15\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV4\t16-31\t1\t\tN/A
GPU3\tSYS\tSYS\tNV4\t X \t16-31\t1\t\tN/A

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
# Four A40 whose bridges join devices that are not neighbours, and two network cards.
CROSSED = """\
        GPU0    GPU1    GPU2    GPU3    NIC0    NIC1    CPU Affinity    NUMA Affinity
GPU0     X      PXB     NV4     SYS     PXB     SYS     0-23,48-71      0
GPU1    PXB      X      SYS     NV4     PXB     SYS     0-23,48-71      0
GPU2    NV4     SYS      X      PXB     SYS     PXB     24-47,72-95     1
GPU3    SYS     NV4     PXB      X      SYS     PXB     24-47,72-95     1
NIC0    PXB     PXB     SYS     SYS      X      SYS
NIC1    SYS     SYS     PXB     PXB     SYS      X

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
# Eight V100 in a hybrid cube mesh: one or two links to four others (DGX-1).
CUBE = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tmlx5_0\tCPU Affinity
GPU0\t X \tNV1\tNV1\tNV2\tNV2\tSYS\tSYS\tSYS\tPIX\t0-19,40-59
GPU1\tNV1\t X \tNV2\tNV1\tSYS\tNV2\tSYS\tSYS\tPIX\t0-19,40-59
GPU2\tNV1\tNV2\t X \tNV2\tSYS\tSYS\tNV1\tSYS\tPHB\t0-19,40-59
GPU3\tNV2\tNV1\tNV2\t X \tSYS\tSYS\tSYS\tNV1\tPHB\t0-19,40-59
GPU4\tNV2\tSYS\tSYS\tSYS\t X \tNV1\tNV1\tNV2\tSYS\t20-39,60-79
GPU5\tSYS\tNV2\tSYS\tSYS\tNV1\t X \tNV2\tNV1\tSYS\t20-39,60-79
GPU6\tSYS\tSYS\tNV1\tSYS\tNV1\tNV2\t X \tNV2\tSYS\t20-39,60-79
GPU7\tSYS\tSYS\tSYS\tNV1\tNV2\tNV1\tNV2\t X \tSYS\t20-39,60-79
mlx5_0\tPIX\tPIX\tPHB\tPHB\tSYS\tSYS\tSYS\tSYS\t X
"""


def matrix(count, link):
    """Return a topology in which all devices are joined in the same way."""
    rows = ["\t" + "\t".join(f"GPU{column}" for column in range(count))]
    for row in range(count):
        cells = [" X " if row == column else link for column in range(count)]
        rows.append("\t".join([f"GPU{row}", *cells]))
    return "\n".join(rows)


SWITCH = matrix(8, "NV12")
PCIE = matrix(4, "PHB")
PAIRED = [
    (BRIDGES, "0123", "0123"),
    (BRIDGES, "0213", "0123"),
    (BRIDGES, "302", "320"),
    (CROSSED, "0123", "0213"),
    (CROSSED, "3210", "3120"),
    (CROSSED, "123", "132"),
    (CROSSED, "012", "021"),
    (CUBE, "01234567", "03124756"),
    (CUBE, "0145", "0415"),
    (SWITCH, "01234567", "01234567"),
    (SWITCH, "62", "62"),
    (PCIE, "2031", "2031"),
    (BRIDGES, "2", "2"),
]


@pytest.mark.parametrize(("topology", "devices", "expected"), PAIRED)
def test_pairs_become_neighbours_and_the_rest_keeps_its_order(topology, devices, expected):
    assert pair_devices(topology, list(devices)) == tuple(expected)


def test_links_are_read_between_any_two_devices():
    links = parse_topology(CUBE)
    assert (links[0, 3], links[3, 0], links[0, 1], links[0, 5], links[2, 2]) == (2, 2, 1, 0, 0)
    assert len(parse_topology(CROSSED)) == 16


@given(st.permutations(range(8)), st.integers(1, 8))
def test_pairing_keeps_all_devices_and_maximizes_links(order, count):
    devices = [str(number) for number in order[:count]]
    links = parse_topology(CUBE)

    def joined(row):
        return sum(links[int(one), int(other)] for one, other in zip(row[::2], row[1::2], strict=False))

    paired = pair_devices(CUBE, devices)
    assert sorted(paired) == sorted(devices)
    assert joined(paired) >= joined(devices)


@pytest.mark.parametrize("device", ["GPU-5f3a", "MIG-1", "9", ""])
def test_a_device_without_a_number_in_the_topology_is_refused(device):
    with refused(LaunchError, code="no-device-number"):
        pair_devices(BRIDGES, ["0", device])


@pytest.mark.parametrize("text", ["", "Failed to initialize NVML: Driver/library version mismatch"])
def test_a_topology_without_gpus_is_refused(text):
    with refused(LaunchError, code="no-matrix"):
        pair_devices(text, ["0", "1"])

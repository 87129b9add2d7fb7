"""Devices, threads and variables of the workers of one host."""

import os
from dataclasses import replace

import pytest

from neox_launcher import worker_environment as module
from neox_launcher.errors import LaunchError
from neox_launcher.orders import Orders
from neox_launcher.resources.host import Host
from neox_launcher.seat import cores_of
from neox_launcher.worker_environment import worker_environment

ORDERS = Orders(
    hosts=(Host("one", (0, 1)),),
    master_addr=None,
    master_port=0,
    environment={},
    worker=("-m", "program"),
    resolved="",
    working_directory="/",
    log_dir=None,
    gpus=0,
    bind_cores=False,
    detect_nvlink_pairs=False,
    stop_timeout=1.0,
    hang_timeout=None,
)


def environment(slots=(0, 1), own=None, cores=8, **changes):
    return worker_environment(replace(ORDERS, **changes), slots, own=own or {}, cores=cores)


def test_cores_are_shared_out_unless_somebody_has_said_otherwise():
    assert environment() == {"OMP_NUM_THREADS": "4"}
    assert environment(cores=1)["OMP_NUM_THREADS"] == "1"
    assert environment(own={"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    ordered = environment(own={"OMP_NUM_THREADS": "3"}, environment={"OMP_NUM_THREADS": "5"})
    assert ordered["OMP_NUM_THREADS"] == "5"


def test_collectives_are_recorded_where_a_hang_is_reported():
    assert environment(hang_timeout=60.0)["TORCH_FR_BUFFER_SIZE"] == "200"


@pytest.mark.parametrize(
    ("slots", "visible", "devices"),
    [
        ((0, 1), None, "0,1"),
        ((3, 1), None, "3,1"),
        ((0, 2), "4,5,6,7", "4,6"),
        ((1,), "GPU-a, GPU-b", "GPU-b"),
    ],
)
def test_slot_i_is_the_ith_visible_device(slots, visible, devices):
    own = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    gpus = 4 if visible is None else len(visible.split(","))
    assert environment(slots, own, gpus=gpus)["CUDA_VISIBLE_DEVICES"] == devices


def test_a_slot_without_a_device_is_refused():
    with pytest.raises(LaunchError, match="slot 2 is asked for, but 2 GPUs are visible here"):
        environment((0, 2), gpus=2)


def test_a_host_that_is_to_find_out_counts_its_own(monkeypatch):
    monkeypatch.setattr(module, "count_gpus", lambda own: 3)
    assert environment((2,), gpus=None)["CUDA_VISIBLE_DEVICES"] == "2"
    monkeypatch.setattr(module, "count_gpus", lambda own: 0)
    assert "CUDA_VISIBLE_DEVICES" not in environment((2,), gpus=None)


def test_pairs_are_made_neighbours(monkeypatch):
    topology = (
        "     GPU0 GPU1 GPU2 GPU3\n"
        "GPU0 X    SYS  NV2  SYS\nGPU1 SYS  X    SYS  NV2\nGPU2 NV2  SYS  X    SYS\nGPU3 SYS  NV2  SYS  X\n"
    )
    monkeypatch.setattr(module, "_topology", lambda: topology)
    found = environment((0, 1, 2, 3), gpus=4, detect_nvlink_pairs=True)
    assert found["CUDA_VISIBLE_DEVICES"] == "0,2,1,3"


def test_each_worker_gets_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 5, 8, 9, 10})
    shares = [cores_of(rank, 3) for rank in range(3)]
    assert shares == [{2, 3}, {4, 5}, {8, 9, 10}]
    assert [cores_of(rank, 8) for rank in (0, 7)] == [{2}, {10}]

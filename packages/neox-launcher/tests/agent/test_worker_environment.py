"""Devices, threads and variables of the workers of one host."""

import os

import pytest

from neox_config.errors import LaunchError
from neox_launcher.agent import worker_environment as module
from neox_launcher.agent.worker_environment import worker_environment
from neox_launcher.worker.bootstrap import cores_of
from support.refusals import refused


@pytest.fixture
def environment(make_orders):
    """Return a function that builds the workers' environments for orders with changes."""

    def build(slots=(0, 1), own=None, cores=8, **changes):
        return worker_environment(make_orders(**changes), slots, own=own or {}, cores=cores)

    return build


def test_omp_num_threads_divides_the_cores_unless_it_is_set(environment):
    assert environment() == {"OMP_NUM_THREADS": "4"}
    assert environment(cores=1)["OMP_NUM_THREADS"] == "1"
    assert environment(own={"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    ordered = environment(own={"OMP_NUM_THREADS": "3"}, environment={"OMP_NUM_THREADS": "5"})
    assert ordered["OMP_NUM_THREADS"] == "5"


def test_workers_of_a_launch_inside_torchrun_do_not_wait_for_its_store(environment):
    found = environment(own={"TORCHELASTIC_USE_AGENT_STORE": "True", "A": "1"})
    assert found["A"] == "1"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in found


def test_the_flight_recorder_is_enabled_with_hang_timeout(environment):
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
def test_slot_i_is_the_ith_visible_device(environment, slots, visible, devices):
    own = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    gpus = 4 if visible is None else len(visible.split(","))
    assert environment(slots, own, gpus=gpus)["CUDA_VISIBLE_DEVICES"] == devices


def test_a_slot_without_a_device_is_refused(environment):
    with refused(LaunchError, "slot 2", "2 GPUs", code="missing-slot"):
        environment((0, 2), gpus=2)


def test_a_host_counts_its_own_gpus_if_the_orders_do_not_give_them(environment, monkeypatch):
    monkeypatch.setattr(module, "count_gpus", lambda own: 3)
    assert environment((2,), gpus=None)["CUDA_VISIBLE_DEVICES"] == "2"
    monkeypatch.setattr(module, "count_gpus", lambda own: 0)
    assert "CUDA_VISIBLE_DEVICES" not in environment((2,), gpus=None)


def test_nvlink_pairs_are_neighbours(environment, monkeypatch):
    topology = (
        "     GPU0 GPU1 GPU2 GPU3\n"
        "GPU0 X    SYS  NV2  SYS\nGPU1 SYS  X    SYS  NV2\nGPU2 NV2  SYS  X    SYS\nGPU3 SYS  NV2  SYS  X\n"
    )
    monkeypatch.setattr(module, "_topology", lambda: topology)
    found = environment((0, 1, 2, 3), gpus=4, detect_nvlink_pairs=True)
    assert found["CUDA_VISIBLE_DEVICES"] == "0,2,1,3"


@pytest.mark.parametrize(
    ("program", "reason"),
    [("#!/bin/sh\nexec sleep 600\n", "timed out after 0.2 seconds"), ("\0", "Exec format error")],
)
def test_a_topology_that_cannot_be_read_is_refused_with_the_reason(
    environment, monkeypatch, tmp_path, program, reason
):
    command = tmp_path / "nvidia-smi"
    command.write_text(program)
    command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "_TOPOLOGY_SECONDS", 0.2)
    with refused(LaunchError, "detect-nvlink-pairs: nvidia-smi", reason, code="no-nvidia-smi"):
        environment((0, 1), gpus=2, detect_nvlink_pairs=True)


def test_each_worker_gets_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 5, 8, 9, 10})
    shares = [cores_of(rank, 3) for rank in range(3)]
    assert shares == [{2, 3}, {4, 5}, {8, 9, 10}]
    assert [cores_of(rank, 8) for rank in (0, 7)] == [{2}, {10}]

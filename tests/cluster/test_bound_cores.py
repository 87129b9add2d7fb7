"""`--bind-cores` in a real training: each worker, with all its threads, has its share of its host's cores."""

import os
from pathlib import Path

import pytest

from support.cluster_job import Job

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.sweep]

HOSTS = ("worker-1 slots=2", "worker-2 slots=2")
CORES = sorted(os.sched_getaffinity(0))


def cores_of(pid):
    """Return the cores that any thread of a process may use."""
    threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    return set().union(*(os.sched_getaffinity(thread) for thread in threads))


@pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be shared out")
@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mpich", "slurm"], indirect=True)
def test_the_two_workers_of_a_host_have_half_of_its_cores_each(cluster, tmp_path, launcher):
    name, before = launcher
    job = Job(cluster, tmp_path, *HOSTS, launcher=name, train_iters=1_000_000)
    running = job.start("--bind-cores", before=before)
    job.wait_for_iteration(2, running)
    found = [[cores_of(pid) for pid in job.workers_on(host)] for host in ("worker-1", "worker-2")]
    running.terminate()
    job.finish(running)
    half = len(CORES) // 2
    assert found == [[set(CORES[:half]), set(CORES[half:])]] * 2

"""Every backend trains over several hosts as one host does alone, through the cluster's real tools."""

from functools import cache

import pytest

from support.cluster import wait_until
from support.cluster_job import Job
from support.cluster_tools import TOOLS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# `make test` has the smallest that is a cluster; `make sweep NAME=cluster` all.
SMOKE = [pytest.param(name, 1, id=f"{name}-1") for name in ("pdsh", "openmpi")]
ALL = [pytest.param(name, 2, marks=pytest.mark.sweep, id=f"{name}-2") for name in TOOLS]
# One worker on the first host, two on the second, one on the third.
INCLUDED = "worker-1:0@worker-2@worker-3:1"


@pytest.fixture(scope="module")
def losses_of_one_host(cluster, tmp_path_factory):
    """Return the losses of one-host jobs by number of workers."""

    @cache
    def train(workers):
        job = Job(cluster, tmp_path_factory.mktemp("local"), num_gpus=workers)
        result = job.run()
        assert result.code == 0, result.err
        assert len(job.losses) == 20
        return job.losses

    return train


@pytest.mark.parametrize(("launcher", "slots"), SMOKE + ALL, indirect=["launcher"])
def test_two_hosts_train_as_one_does(cluster, tmp_path, losses_of_one_host, launcher, slots):
    name, before = launcher
    job = Job(cluster, tmp_path, f"worker-1 slots={slots}", f"worker-2 slots={slots}", launcher=name)
    result = job.run(before=before)
    assert result.code == 0, result.err
    assert job.losses == losses_of_one_host(2 * slots)
    logs = sorted(path.name for path in (job.logs / "output").iterdir())
    assert logs == [f"rank-{rank:05d}.log" for rank in range(2 * slots)]


@pytest.mark.sweep
@pytest.mark.parametrize("launcher", TOOLS, indirect=True)
def test_chosen_slots_of_three_hosts_train_as_one_host_does(cluster, tmp_path, losses_of_one_host, launcher):
    name, before = launcher
    hosts = [f"worker-{number} slots=2" for number in (1, 2, 3)]
    job = Job(cluster, tmp_path, *hosts, launcher=name, include=INCLUDED)
    running = job.start("--output", "all", before=before)
    wait_until(
        lambda: [len(job.workers_on(host.name)) for host in cluster.workers] == [1, 2, 1],
        "one worker, two and one",
    )
    result = job.finish(running)
    assert result.code == 0, result.err
    assert job.losses == losses_of_one_host(4)
    assert "worker-1 0: " in result.err


@pytest.mark.sweep
@pytest.mark.parametrize("launcher", ["slurm"], indirect=True)
def test_the_hosts_of_an_allocation_are_used_without_a_hostfile(
    cluster, tmp_path, losses_of_one_host, launcher
):
    job = Job(cluster, tmp_path, launcher="slurm", num_nodes=2, num_gpus=2)
    result = job.run(before=launcher[1])
    assert result.code == 0, result.err
    assert job.losses == losses_of_one_host(4)

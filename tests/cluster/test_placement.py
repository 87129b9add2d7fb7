"""Every launcher starts the same ranks on the same hosts: those of the plan, whatever order the tool likes.

Three hosts with one, one and two workers, a slot left out in the middle, in an order that is not the
alphabet's, train what one host does alone.
"""

import re

import pytest

from support.cluster_job import Job
from support.cluster_tools import TOOLS

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.sweep]

HOSTS = ("worker-3 slots=1", "worker-1 slots=1", "worker-2 slots=3")
EXCLUDED = "worker-2:1"
PLACES = {("worker-3", 0), ("worker-1", 1), ("worker-2", 2), ("worker-2", 3)}
# It travels, and makes every rank say something.
TALKATIVE = ("env", "TORCH_CPP_LOG_LEVEL=INFO")


@pytest.fixture(scope="module")
def losses_of_one_host(cluster, tmp_path_factory):
    job = Job(cluster, tmp_path_factory.mktemp("local"), num_gpus=4)
    result = job.run()
    assert result.code == 0, result.err
    return job.losses


@pytest.mark.parametrize("launcher", TOOLS, indirect=True)
def test_ranks_are_where_the_plan_has_them(cluster, tmp_path, losses_of_one_host, launcher):
    name, before = launcher
    job = Job(cluster, tmp_path, *HOSTS, exclude=EXCLUDED, launcher=name)
    result = job.run("--output", "all", before=(*before, *TALKATIVE))
    assert result.code == 0, result.err
    assert job.losses == losses_of_one_host
    seen = re.findall(r"^(worker-\d) (\d): ", result.out + result.err, re.MULTILINE)
    assert {(host, int(rank)) for host, rank in seen} == PLACES


@pytest.mark.parametrize("launcher", ["openmpi"], indirect=True)
def test_mpi_starts_the_workers_of_one_machine_if_requested(cluster, tmp_path, losses_of_one_host, launcher):
    job = Job(cluster, tmp_path, num_gpus=4, deepspeed_mpi=True)
    result = job.run()
    assert result.code == 0, result.err
    assert job.losses == losses_of_one_host

"""Every backend trains over several hosts as one host does alone, through the cluster's real tools."""

import pytest

from support.cluster import why_not_here
from support.cluster_job import Job

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TOOLS = {
    "pdsh": "pdsh",
    "ssh": "ssh",
    "openmpi": "mpirun.openmpi",
    "mpich": "mpiexec.hydra",
}
SMOKE = ("pdsh", "openmpi")
BACKENDS = [pytest.param(name, marks=[] if name in SMOKE else [pytest.mark.sweep], id=name) for name in TOOLS]


@pytest.fixture(scope="module")
def losses_of_one_host(cluster, tmp_path_factory):
    job = Job(cluster, tmp_path_factory.mktemp("local"), num_gpus=4)
    result = job.run()
    assert result.code == 0, result.err
    assert len(job.losses) == 20
    return job.losses


def skip_without(launcher):
    reason = why_not_here(TOOLS[launcher])
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("launcher", BACKENDS)
def test_two_hosts_train_as_one_does(cluster, tmp_path, losses_of_one_host, launcher):
    skip_without(launcher)
    job = Job(cluster, tmp_path, "worker-1 slots=2", "worker-2 slots=2", launcher=launcher)
    result = job.run()
    assert result.code == 0, result.err
    assert job.losses == losses_of_one_host
    ranks = sorted(path.name for path in (job.logs / "output").iterdir())
    assert ranks == ["rank-00001.log", "rank-00002.log", "rank-00003.log"]

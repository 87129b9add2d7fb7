"""After the loss of a host, an elastic training continues on the others with the next samples."""

import pytest

from neox_model.checkpoint.contents import Manifest
from support.cluster_job import Job
from support.refusals import shows

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.sweep]

HOSTS = tuple(f"worker-{number} slots=1" for number in (1, 2, 3))
ITERATIONS, BATCH, TOKENS = 100, 12, 16
# 12 samples are 6 micro-batches of 2: 2 for each of three workers, 3 for each of two. Nothing is random.
ELASTIC = {
    "elasticity": {
        "enabled": True,
        "max_train_batch_size": BATCH,
        "micro_batch_sizes": [2],
        "version": 0.1,
    },
    "train_micro_batch_size_per_gpu": None,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "train_iters": ITERATIONS,
}


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """Return the losses of three hosts of which none is lost."""
    job = Job(cluster, tmp_path_factory.mktemp("undisturbed"), *HOSTS, **ELASTIC)
    result = job.run()
    assert result.code == 0, result.err
    return job.losses


def lose(cluster, job, fault, name, *, before):
    """Run a job whose host crashes, or is cut off, in the middle; how it ended."""
    running = job.start("--max-restarts", "1", before=before)
    job.wait_for_iteration(9, running)
    {"crash": cluster.crash, "cut": cluster.cut}[fault](name)
    try:
        return job.finish(running)
    finally:
        {"crash": cluster.boot, "cut": cluster.mend}[fault](name)


@pytest.mark.parametrize(
    ("launcher", "fault", "name"),
    [
        pytest.param("pdsh", "crash", "worker-1", id="pdsh-rank0"),
        pytest.param("ssh", "crash", "worker-3", id="ssh-last"),
        pytest.param("openmpi", "crash", "worker-2", id="openmpi"),
        pytest.param("mpich", "crash", "worker-2", id="mpich"),
        pytest.param("ssh", "cut", "worker-1", id="cable-of-rank0"),
        # The last one: Slurm's daemon does not come back with its host.
        pytest.param("slurm", "crash", "worker-2", id="slurm"),
    ],
    indirect=["launcher"],
)
def test_training_continues_with_the_same_samples(cluster, tmp_path, undisturbed, launcher, fault, name):
    tool, before = launcher
    saved = tmp_path / "saved"
    job = Job(cluster, tmp_path, *HOSTS, launcher=tool, save=str(saved), save_interval=4, **ELASTIC)
    result = lose(cluster, job, fault, name, before=before)
    assert result.code == 0, result.err
    left = ", ".join(line.split()[0] for line in HOSTS if name not in line)
    assert shows(result.err, "restart 1", "most 1", "2 s", saved)
    assert shows(result.err, name, "2 workers", "3", left)
    assert shows(result.err, "batch 12", "micro-batch 2", "steps 3")
    assert "different order" not in result.err
    # Every iteration once, each with the loss that it has without a loss of hosts.
    assert [iteration for iteration, _ in job.record] == list(range(1, ITERATIONS + 1))
    assert job.losses == pytest.approx(undisturbed, rel=1e-5)
    manifest = Manifest.read(saved / f"global_step{ITERATIONS}")
    assert manifest.training["tokens"] == ITERATIONS * BATCH * TOKENS
    assert manifest.layout.data == 2

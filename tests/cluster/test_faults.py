"""What can go wrong on a cluster, done on purpose: the first error is shown, nothing is left, jobs resume."""

import re
import signal

import pytest

from neox_config.facts.checkpoints import complete_checkpoints
from support.cluster_job import Job
from support.cluster_tools import TOOLS
from support.refusals import shows

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TWO_HOSTS = ("worker-1 slots=1", "worker-2 slots=1")
ENDLESS = {"train_iters": 1_000_000}


def saving(folder, **settings):
    """Return settings of a job that saves every second iteration and resumes from its checkpoint."""
    return {"save": str(folder / "saved"), "load": str(folder / "saved"), "save_interval": 2, **settings}


def newest(folder):
    names = [path.name for path in complete_checkpoints(folder / "saved")]
    return max((int(name.removeprefix("global_step")) for name in names), default=0)


def test_a_worker_that_is_killed_ends_all_others_and_is_named(cluster, tmp_path):
    job = Job(cluster, tmp_path, *TWO_HOSTS, **ENDLESS)
    launcher = job.start()
    job.wait_for_iteration(2, launcher)
    cluster.kill(job.workers_on("worker-2"))
    job.expect_nothing_left()
    result = job.finish(launcher)
    assert result.code == 137
    assert shows(result.err, "worker 1", "worker-2", "SIGKILL")


@pytest.mark.sweep
def test_a_killed_job_restarts_from_its_newest_checkpoint(cluster, tmp_path):
    undisturbed = Job(cluster, tmp_path / "undisturbed", *TWO_HOSTS)
    assert undisturbed.run().code == 0
    job = Job(cluster, tmp_path, *TWO_HOSTS, **saving(tmp_path, load=None))
    launcher = job.start("--max-restarts", "2")
    job.wait_for_iteration(5, launcher)
    cluster.kill(job.workers_on("worker-1"))
    result = job.finish(launcher)
    assert result.code == 0, result.err
    assert shows(result.err, "restart 1", "most 2", "2 s", f"{tmp_path}/saved")
    assert shows(result.err, "worker 0", "worker-1", "SIGKILL")
    assert job.losses == undisturbed.losses


@pytest.mark.sweep
def test_nothing_outlives_a_launcher_that_is_killed_and_the_job_resumes(cluster, tmp_path):
    job = Job(cluster, tmp_path, *TWO_HOSTS, **saving(tmp_path))
    launcher = job.start()
    job.wait_for_iteration(4, launcher)
    launcher.kill()
    job.finish(launcher)
    assert newest(tmp_path) >= 2
    result = job.run()
    assert result.code == 0, result.err
    assert len(job.losses) == 20


@pytest.mark.sweep
def test_the_workers_of_an_agent_that_is_killed_end_and_the_host_is_named(cluster, tmp_path):
    job = Job(cluster, tmp_path, *TWO_HOSTS, **ENDLESS)
    launcher = job.start()
    job.wait_for_iteration(1, launcher)
    cluster.kill(cluster.hosts["worker-2"].processes("python -P -m neox_launcher.agent"))
    job.expect_nothing_left()
    result = job.finish(launcher)
    assert result.code == 1
    assert shows(result.err, "worker-2", "worker 1")


@pytest.mark.sweep
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_a_host_that_mpi_cannot_reach_is_named(cluster, tmp_path, launcher):
    hosts = ("worker-1 slots=1", "worker-gone slots=1")
    # MPICH waits on when one of its hosts cannot be reached.
    result = Job(cluster, tmp_path, *hosts, launcher=launcher, start_timeout=20).run()
    assert result.code == 1
    before, _, said = result.err.rpartition("output of the start command:")
    assert "worker-gone: " in before.splitlines()[-1]
    assert "No route to" in said


@pytest.mark.sweep
def test_a_cable_that_is_pulled_is_a_hang_that_names_the_host(cluster, tmp_path):
    job = Job(cluster, tmp_path, *TWO_HOSTS, hang_timeout=5.0, **ENDLESS)
    launcher = job.start()
    job.wait_for_iteration(2, launcher)
    cluster.cut("worker-2")
    try:
        out, err = launcher.communicate(timeout=240)
    finally:
        cluster.mend("worker-2")
    assert launcher.returncode == 1, out
    assert shows(err, "5 s", "(hang-timeout)", "rank 1", "worker-2")
    [report] = job.logs.glob("hang-*.txt")
    assert str(report) in err
    text = report.read_text()
    # Which collective depends on the moment.
    assert re.search(r"^0 +worker-1 .*: \d+ gloo:\w+", text, re.MULTILINE)
    assert "--- rank 0\n" in text
    # The unreachable host ends its worker when its kernel detects the lost connection.
    job.expect_nothing_left(120)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)]
)
def test_a_request_to_stop_saves_on_all_hosts(cluster, tmp_path, number, code):
    job = Job(cluster, tmp_path, *TWO_HOSTS, **saving(tmp_path, save_interval=1_000_000, **ENDLESS))
    launcher = job.start()
    job.wait_for_iteration(2, launcher)
    launcher.send_signal(number)
    result = job.finish(launcher)
    assert result.code == code, result.err
    assert "received: stopping after" in result.err
    assert newest(tmp_path) == len(job.losses) > 0


@pytest.mark.sweep
@pytest.mark.parametrize("launcher", list(TOOLS), indirect=True)
@pytest.mark.parametrize("where", ["every process of the hosts", "one agent"])
def test_a_schedulers_warning_saves_with_every_launcher(cluster, tmp_path, launcher, where):
    name, before = launcher
    settings = saving(tmp_path, save_interval=1_000_000, **ENDLESS)
    job = Job(cluster, tmp_path, *TWO_HOSTS, launcher=name, **settings)
    running = job.start(before=before)
    job.wait_for_iteration(2, running)
    hosts = [cluster.hosts[host] for host in ("worker-1", "worker-2")]
    if where == "one agent":
        signalled = hosts[1].processes("python -P -m neox_launcher.agent")[:1]
    else:
        signalled = [pid for host in hosts for pid in host.processes("-m neox_launcher.")]
    assert signalled
    for _ in range(2):
        cluster.kill(signalled, signal.SIGUSR1)
    result = job.finish(running)
    assert result.code == 138, result.err
    assert "SIGUSR1 received" in result.err
    assert newest(tmp_path) == len(job.losses) > 0


@pytest.mark.sweep
@pytest.mark.parametrize("launcher", ["slurm"], indirect=True)
def test_slurms_own_warning_to_an_allocation_saves(cluster, tmp_path, launcher):
    """`scancel --signal` signals what `sbatch --signal` does: all processes of the job's steps."""
    settings = saving(tmp_path, save_interval=1_000_000, **ENDLESS)
    job = Job(cluster, tmp_path, *TWO_HOSTS, launcher="slurm", **settings)
    running = job.start(before=launcher[1])
    job.wait_for_iteration(2, running)
    listed = cluster.start("squeue", "--noheader", "--format=%A").communicate(timeout=60)[0]
    for _ in range(2):
        assert cluster.start("scancel", "--signal=USR1", *listed.split()).wait(timeout=60) == 0
    result = job.finish(running)
    assert result.code == 138, result.err
    assert "SIGUSR1 received" in result.err
    assert newest(tmp_path) == len(job.losses) > 0


@pytest.mark.sweep
def test_a_request_to_stop_while_hosts_are_starting_ends_them(cluster, tmp_path):
    job = Job(cluster, tmp_path, *TWO_HOSTS, **ENDLESS)
    launcher = job.start()
    while not cluster.hosts["worker-2"].processes("neox_launcher.agent"):
        assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    assert job.finish(launcher).code == 130


@pytest.mark.sweep
def test_the_doctor_finds_hosts_that_fit_and_a_folder_that_they_do_not_share(cluster, tmp_path):
    job = Job(cluster, tmp_path, *TWO_HOSTS, **saving(tmp_path))
    good = job.run("doctor")
    assert good.code == 0, good.out + good.err
    assert "can run the" in good.out
    assert "reach and join" in good.out
    assert shows(good.out, "2 hosts", "2 workers")
    assert "GB/s per link" in good.out
    (tmp_path / "saved").mkdir(exist_ok=True)
    cluster.hosts["worker-2"].run("mount", "-t", "tmpfs", "tmpfs", tmp_path / "saved")
    bad = job.run("doctor")
    assert bad.code == 1
    assert shows(bad.out, f"worker-2, {tmp_path}/saved", "rank 0")
    assert "1 problem to" in bad.out

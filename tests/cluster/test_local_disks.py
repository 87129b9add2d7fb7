"""Checkpoints on the disks of two hosts that share no folder for them, through `neox-launch`."""

import pytest

from support.cluster_job import Job
from support.refusals import shows

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.sweep]

HOSTS = ("worker-1 slots=1", "worker-2 slots=1")


def test_a_killed_job_restarts_and_resumes_on_exchanged_hosts_until_a_disk_is_lost(cluster, tmp_path):
    undisturbed = Job(cluster, tmp_path / "undisturbed", *HOSTS)
    assert undisturbed.run().code == 0
    saved = tmp_path / "saved"
    saved.mkdir()
    hosts = [cluster.hosts[name] for name in ("worker-1", "worker-2")]
    for host in hosts:
        host.run("mount", "-t", "tmpfs", "tmpfs", saved)
    settings = {
        "save": str(saved),
        "load": str(saved),
        "save_interval": 2,
        "keep_last_n_checkpoints": 2,
        "checkpoint": {"use_node_local_storage": True},
    }
    job = Job(cluster, tmp_path, *HOSTS, **settings, exit_interval=12)
    doctor = job.run("doctor")
    assert doctor.code == 0, doctor.out + doctor.err
    launcher = job.start("--max-restarts", "2")
    job.wait_for_iteration(5, launcher)
    cluster.kill(job.workers_on("worker-2"))
    result = job.finish(launcher)
    assert shows(result.err, "restart 1", "most 2", "2 s", saved)
    assert len(job.losses) == 12, result.err
    for rank, host in enumerate(hosts):
        found = host.run("sh", "-c", f"cd {saved}; ls -d global_step*; cat latest; ls global_step12").split()
        assert found == [
            *("global_step10", "global_step12", "global_step12"),
            *("manifest.json", f"shard-{rank:05d}.safetensors"),
        ]
    exchanged = Job(cluster, tmp_path, *HOSTS[::-1], **settings)
    result = exchanged.run()
    assert result.code == 0, result.err
    assert exchanged.losses == undisturbed.losses
    assert not list(saved.iterdir())
    hosts[1].run("umount", saved)
    result = exchanged.run()
    assert result.code != 0
    assert shows(result.err, "global_step20", "worker-2, worker-1", "shard-00000")
    assert "worker-2 has nothing" in result.err
    assert "Traceback" not in result.err

"""Slurm on the hosts of a pretended cluster: one controller on the login host, one daemon per worker."""

import os
from pathlib import Path

from support.cluster import LOGIN, Cluster, wait_until

__all__ = ["start_slurm"]

_CONF = """
ClusterName=pretended
SlurmctldHost=login
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=30
NodeName={nodes} CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes={nodes} Default=YES State=UP MaxTime=INFINITE
"""


def start_slurm(cluster: Cluster) -> None:
    """Start Slurm's daemons, and wait until all workers are idle; its commands work from then on."""
    folder = cluster.folder / "slurm"
    for path in (folder, folder / "state"):
        path.mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(folder=folder, nodes=",".join(host.name for host in cluster.workers)))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    login = cluster.hosts[LOGIN]
    login.run(*_munged(folder))
    login.run("/usr/sbin/slurmctld", "-f", conf)
    for host in cluster.workers:
        host.run("/usr/sbin/slurmd", "-f", conf, "-N", host.name)

    def all_idle() -> bool:
        states = login.run("env", f"SLURM_CONF={conf}", "sinfo", "-h", "-o", "%t %D").split()
        return states == ["idle", str(len(cluster.workers))]

    wait_until(all_idle, "the readiness of all of Slurm's nodes")
    cluster.environment["SLURM_CONF"] = str(conf)


def _munged(folder: Path) -> list[str]:
    """Start the daemon that signs Slurm's messages; it requires a key and private folders."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {"key": "key", "log": "log", "pid": "pid", "seed": "seed"}
    return [
        "/usr/sbin/munged",
        "--force",
        f"--socket={folder}/munge.socket",
        *(f"--{name}-file={folder}/munge.{ending}" for name, ending in files.items()),
    ]

"""What each backend needs on a pretended cluster, and what stands before its command."""

from support.cluster import Cluster, why_not_here
from support.cluster_slurm import start_slurm

__all__ = ["TOOLS", "words_before"]

TOOLS = {
    "pdsh": ("pdsh",),
    "ssh": ("ssh",),
    "openmpi": ("mpirun.openmpi",),
    "mpich": ("mpiexec.hydra",),
    # MVAPICH itself is in no distribution; newer ones come with the hydra that MPICH has.
    "mvapich": ("mpiexec.hydra",),
    "slurm": ("srun", "salloc", "slurmd", "slurmctld", "munged"),
}


def words_before(cluster: Cluster, launcher: str) -> tuple[str, ...]:
    """Return the words before `neox-launch`: under Slurm, those that allocate all hosts.

    Raises:
        LookupError: its tools are not here; the message names the one.
    """
    reason = why_not_here(*TOOLS[launcher])
    if reason is not None:
        raise LookupError(reason)
    if launcher != "slurm":
        return ()
    if "SLURM_CONF" not in cluster.environment:
        start_slurm(cluster)
    return ("salloc", "--quiet", f"--nodes={len(cluster.workers)}", "--exclusive")

"""Where the workers run and how they are started."""

from typing import Literal

from neox_launcher.config.parameter import Section, param

__all__ = ["MPI_LAUNCHERS", "LaunchSection"]

# These start one process per worker, which learns its rank from them.
MPI_LAUNCHERS = ("openmpi", "mvapich", "mpich")


class LaunchSection(Section, resume="free"):
    """Hosts, devices and the way to start a worker on each."""

    hostfile: str | None = param(
        None,
        origin="DSL",
        none_means="the file that DLTS_HOSTFILE names, else /job/hostfile when it exists, else the Slurm "
        "allocation with launcher slurm, else this host alone",
        doc="File with one host per line and its device slots, as in `worker-1 slots=4`.",
    )
    include: str | None = param(
        None,
        origin="DSL",
        none_means="every host and slot of the hostfile",
        doc="Hosts and slots to use: NAME[:SLOT[,SLOT ...]], joined by @.",
    )
    exclude: str | None = param(
        None,
        origin="DSL",
        none_means="nothing is left out",
        doc="Hosts and slots to leave out, written as for `include`.",
    )
    num_nodes: int = param(
        -1, origin="DSL", ge=-1, doc="How many hosts of the hostfile to use, from the top; -1 means all."
    )
    num_gpus: int | None = param(
        None,
        origin="DSL",
        ge=-1,
        none_means="all devices of each host, as does -1; one process where there is no GPU",
        doc="Devices to use on each host; without GPUs, the number of processes.",
    )
    master_port: int = param(
        29500,
        origin="DSL",
        ge=0,
        le=65535,
        doc="TCP port where rank 0 waits for the others; 0, or no value, picks one that is free on the "
        "first host.",
    )
    master_addr: str | None = param(
        None,
        origin="DSL",
        none_means="this machine when it works alone, else the first address of the first host",
        doc="Address where rank 0 waits for the others.",
    )
    launcher: Literal["pdsh", "ssh", "openmpi", "mvapich", "mpich", "slurm", "local"] = param(
        "pdsh",
        origin="DSL",
        used_when="the job has another host than this one, or deepspeed_mpi is true",
        doc="What starts the workers on the hosts; docs/launching.md has a section on each.",
    )
    launcher_args: str | None = param(
        None,
        origin="DSL",
        none_means="nothing is added",
        doc="Further arguments for the program that `launcher` names, written as for a shell.",
    )
    detect_nvlink_pairs: bool = param(
        False,
        origin="DSL",
        doc="Order the visible GPUs so that pairs joined by NVLink are neighbours; useful with "
        "model-parallel-size 2.",
    )
    deepspeed_mpi: bool = param(
        False,
        origin="NeoX",
        doc="Start the workers by MPI, on this host alone too, and learn each one's rank from it: by the one "
        "that `launcher` names, else Open MPI.",
    )
    start_timeout: float = param(
        300.0,
        origin="ours",
        gt=0,
        doc="Seconds within which every host must have reported to the launcher.",
    )
    stop_timeout: float = param(
        600.0,
        origin="ours",
        gt=0,
        doc="Seconds that the workers get to finish the iteration and save after a request to stop (Ctrl-C, "
        "SIGTERM, SIGUSR1).",
    )
    hang_timeout: float | None = param(
        1800.0,
        origin="ours",
        gt=0,
        none_means="a hang is never noticed",
        doc="Seconds without a finished iteration after which every rank reports where it stands, and the "
        "job ends; longer than the longest evaluation between iterations. Saving takes as long as it needs.",
    )

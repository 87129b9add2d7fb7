"""Where the workers run and how they are started."""

from typing import Literal

from neox_launcher.config.parameter import Section, param

__all__ = ["LaunchSection"]


class LaunchSection(Section):
    """Hosts, devices and the way to start a worker on each."""

    hostfile: str | None = param(
        None,
        origin="DSL",
        none_means="/job/hostfile when it exists, else this host alone",
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
        doc="TCP port where rank 0 waits for the others; 0 picks a free one.",
    )
    master_addr: str | None = param(
        None,
        origin="DSL",
        none_means="this machine when it works alone, else the first address of the first host",
        doc="Address where rank 0 waits for the others.",
    )
    launcher: Literal["pdsh", "openmpi", "mvapich", "mpich", "slurm"] = param(
        "pdsh",
        origin="DSL",
        used_when="the job has more than one host",
        doc="What starts the workers on the hosts.",
    )
    detect_nvlink_pairs: bool = param(
        False,
        origin="DSL",
        doc="Order the visible GPUs so that pairs joined by NVLink are neighbours; useful with "
        "model-parallel-size 2.",
    )
    deepspeed_mpi: bool = param(
        False, origin="NeoX", doc="Learn rank, world size and master address from the MPI environment."
    )

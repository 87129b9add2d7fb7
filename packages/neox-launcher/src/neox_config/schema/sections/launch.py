"""Hosts, devices and launch backend."""

from typing import Literal

from neox_config.facts.hosts import MOST_HOSTS, MOST_SLOTS
from neox_config.schema.parameter import Section, param
from neox_config.schema.paths import PathText

__all__ = ["MPI_LAUNCHERS", "LaunchSection"]

# These start one process per worker and give it its rank.
MPI_LAUNCHERS = ("openmpi", "mvapich", "mpich")

_OTHER_HOSTS = "the job has another host than this one, or deepspeed_mpi is true"


class LaunchSection(Section, resume="free"):
    """Hosts, devices and the launch backend that starts one worker per device."""

    hostfile: PathText | None = param(
        None,
        origin="DSL",
        none_means="the file named by DLTS_HOSTFILE, else /job/hostfile if it exists, else the Slurm "
        "allocation with launcher slurm, else only this host",
        doc="File that lists one host per line with its number of devices, for example `worker-1 slots=4`.",
    )
    include: str | None = param(
        None,
        origin="DSL",
        none_means="every host and slot of the hostfile",
        doc="Hosts and slots to use: NAME[:SLOT[,SLOT ...]], separated by @.",
    )
    exclude: str | None = param(
        None,
        origin="DSL",
        none_means="nothing is excluded",
        doc="Hosts and slots to exclude, in the format of `include`.",
    )
    num_nodes: int = param(
        -1,
        origin="DSL",
        ge=-1,
        le=MOST_HOSTS,
        doc="Number of hosts to use, from the top of the hostfile; -1 means all.",
    )
    num_gpus: int | None = param(
        None,
        origin="DSL",
        ge=-1,
        le=MOST_SLOTS,
        none_means="all devices of each host (as -1), or one process if there is no GPU",
        doc="Number of devices to use per host; without GPUs, the number of processes.",
    )
    master_port: int = param(
        29500,
        origin="DSL",
        ge=0,
        le=65535,
        doc="TCP port on which rank 0 accepts the other ranks; 0, or no value, picks a free port on the "
        "first host.",
    )
    master_addr: str | None = param(
        None,
        origin="DSL",
        none_means="this machine if it is the only host, else the first address of the first host",
        doc="Address on which rank 0 accepts the other ranks.",
    )
    launcher: Literal["pdsh", "ssh", "openmpi", "mvapich", "mpich", "slurm", "local"] = param(
        "pdsh",
        origin="DSL",
        used_when=_OTHER_HOSTS,
        doc="Launch backend, which starts the workers on the hosts; docs/launching.md describes each.",
    )
    launcher_args: str | None = param(
        None,
        origin="DSL",
        none_means="no additional arguments",
        doc="Additional arguments for the program selected by `launcher`, quoted as for a shell.",
    )
    launcher_address: str | None = param(
        None,
        origin="ours",
        none_means="all addresses of this machine, which the hosts try in order",
        used_when=_OTHER_HOSTS,
        doc="Address or name of this machine to which the hosts connect. The launcher listens only there; if "
        "it is not an address of this machine (a forwarded port), it listens on all addresses.",
    )
    launcher_port: int = param(
        0,
        origin="ours",
        ge=0,
        le=65535,
        used_when=_OTHER_HOSTS,
        doc="TCP port of this machine to which the hosts connect, for firewalls; 0 picks a free port.",
    )
    comment: str | None = param(
        None,
        origin="NeoX",
        none_means="no comment",
        used_when="launcher is slurm",
        doc="Comment of the job step, passed to srun as --comment.",
    )
    account: str | None = param(
        None,
        origin="NeoX",
        none_means="the account of the allocation",
        used_when="launcher is slurm",
        doc="Slurm account that the job step is charged to, passed to srun as --account.",
    )
    remote_setup: str | None = param(
        None,
        origin="ours",
        none_means="the agents start in the environment that the launcher's program provides",
        used_when=_OTHER_HOSTS,
        doc="Shell commands that every host runs with bash before its agent, for example `module load cuda; "
        "source venv/bin/activate`. Other users of the host can read them.",
    )
    remote_prefix: str | None = param(
        None,
        origin="ours",
        none_means="the agents run on the hosts themselves",
        used_when=_OTHER_HOSTS,
        doc="Command that every host runs its agent with, for example that of a container: `apptainer exec "
        "--nv image.sif`, `docker exec -i NAME`.",
    )
    detect_nvlink_pairs: bool = param(
        False,
        origin="DSL",
        doc="Order the visible GPUs so that pairs connected by NVLink are adjacent; useful with "
        "model-parallel-size 2.",
    )
    deepspeed_mpi: bool = param(
        False,
        origin="NeoX",
        doc="Start the workers with MPI, even on a single host, and take their ranks from it. Uses the MPI "
        "selected by `launcher`, else Open MPI.",
    )
    terminal: Literal["auto", "live", "plain"] = param(
        "auto",
        origin="ours",
        doc="What neox-launch shows of a run besides its log; without effect on other programs and on "
        "autotuning, which show their output alone. live: a start screen, a line at the "
        "bottom of the terminal that is updated, and a summary at the end; refused if standard error is not "
        "a terminal that can show them. plain: the same summary, as text. auto: live if that is possible, "
        "else plain.",
    )
    start_timeout: float = param(
        300.0,
        origin="ours",
        gt=0,
        le=2_000_000,
        doc="Timeout in seconds for every host to connect to the launcher.",
    )
    stop_timeout: float = param(
        600.0,
        origin="ours",
        gt=0,
        le=2_000_000,
        doc="Timeout in seconds for the workers to finish the iteration and save after a request to stop "
        "(Ctrl-C, SIGTERM, SIGUSR1); with async-save, also to complete the previous save.",
    )
    hang_timeout: float | None = param(
        1800.0,
        origin="ours",
        gt=0,
        le=2_000_000,
        none_means="hangs after the first iteration are not detected",
        doc="Seconds without a finished iteration, after the first one, until every rank reports its stack "
        "and the job stops. Must be longer than the longest evaluation between iterations. Saving is not "
        "limited, except that of iteration 0, which first-iteration-timeout limits, and that the writer of "
        "an asynchronous save must make progress within this time.",
    )
    first_iteration_timeout: float | None = param(
        7200.0,
        origin="ours",
        gt=0,
        le=2_000_000,
        none_means="hangs before the first iteration are not detected",
        doc="Seconds from the start of the workers within which a run must finish its first iteration; "
        "else every rank reports its stack and the job stops. Must be longer than building indices, loading "
        "the checkpoint, saving iteration 0 (extra-save-iters) and compiling take together.",
    )

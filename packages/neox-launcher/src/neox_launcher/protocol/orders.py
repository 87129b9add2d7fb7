"""The orders that the launcher sends to its agents.

The same orders are encoded once for all agents, and their size does not depend on the number of hosts; the
`Place` of an agent contains what differs. Both are sent only over the control connection: they contain the
values of environment variables, which must not appear on command lines or in logs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from neox_launcher.resources.host import Host

__all__ = ["AgentOrders", "Orders", "Place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOrders:
    """The part of the orders that every agent receives.

    Args:
        master_addr: address of rank 0; None for the first address that host 0 reports.
        master_port: port of rank 0; 0 for a free port of host 0.
        environment: variables set for the workers in addition to those of the host.
        worker: arguments of the Python interpreter, the same for every worker.
        resolved: configuration as written by `encode_resolved`; a worker reads it from a file that only the
            user can read, given by `--resolved PATH`. Empty for a program without a configuration.
        working_directory: working directory of the workers.
        log_dir: folder for the output of the ranks: of all if they train, else of those that the terminal
            does not show; None to write no files.
        gpus: GPUs per host; 0 if slots are CPU processes, None if each host counts its own.
        bind_cores: bind each worker to its share of the host's CPU cores.
        detect_nvlink_pairs: order the devices of each host so that pairs joined by NVLink are neighbours.
        stop_timeout: seconds for the workers to save after a request to stop.
        hang_timeout: seconds without progress after which a hang is reported; None to disable.
        first_iteration_timeout: the same for the time before the first iteration; None for programs that
            report no iterations.
        output: `rank0`: the terminal shows the output of rank 0; `all`: of all ranks, with host and rank.
        is_training: the workers train: on a request to stop they finish the iteration and save, and their
            failures belong to the record of the run.
    """

    master_addr: str | None
    master_port: int
    environment: Mapping[str, str]
    worker: tuple[str, ...]
    resolved: str
    working_directory: str
    log_dir: str | None
    gpus: int | None
    bind_cores: bool
    detect_nvlink_pairs: bool
    stop_timeout: float
    hang_timeout: float | None
    first_iteration_timeout: float | None = None
    output: str = "rank0"
    is_training: bool = True

    @property
    def record_folder(self) -> Path | None:
        """Folder with the record of the run; None: there is none."""
        is_kept = self.log_dir is not None and self.is_training
        return Path(self.working_directory, self.log_dir or "") if is_kept else None

    @classmethod
    def from_fields(cls, content: Mapping[str, Any]) -> Self:
        """Build the orders from the fields of `Orders.for_agents`, parsed from JSON."""
        return cls(**{**content, "worker": tuple(content["worker"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders(AgentOrders):
    """Orders of one launch.

    Args:
        hosts: in the order of ranks: host 0 has the ranks from 0 to its number of slots - 1, and so on.
        is_interactive: rank 0 answers prompts: Ctrl-C during a reply ends the reply, not the job.
        is_server: the workers run until a request to stop, after which they succeed.
    """

    hosts: tuple[Host, ...]
    is_interactive: bool = False
    is_server: bool = False

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return sum(len(host.slots) for host in self.hosts)

    def for_agents(self) -> dict[str, Any]:
        """Return the fields that every agent receives."""
        return {field.name: getattr(self, field.name) for field in fields(AgentOrders)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place of one agent in the launch.

    Args:
        slots: slots of its host, one worker each, whichever agent starts it.
        ranks: ranks of the workers that it starts; a single one under MPI.
        local_rank: local rank of the first of them.
        num_workers: number of workers of the launch.
        is_mpi: started by MPI, one agent per rank.
        shares_terminal: uses the terminal of the launcher.
    """

    slots: tuple[int, ...]
    ranks: tuple[int, ...]
    local_rank: int
    num_workers: int
    is_mpi: bool
    shares_terminal: bool

    @classmethod
    def from_fields(cls, content: Mapping[str, Any]) -> Self:
        """Build a place from the fields of `dataclasses.asdict`, parsed from JSON."""
        return cls(**{**content, "slots": tuple(content["slots"]), "ranks": tuple(content["ranks"])})

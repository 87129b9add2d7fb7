"""What every node is told to do, once it has proved itself; the same text goes to all of them.

Orders travel over the control connection alone: they hold the values of environment variables, which stand
on no command line and in no log.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from neox_launcher.resources.host import Host

__all__ = ["Orders", "Place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """One launch, as its nodes carry it out.

    Args:
        hosts: in the order of ranks: host 0 has ranks 0 to its number of slots - 1, and so on.
        master_addr: where rank 0 waits; None for the first address that node 0 reports.
        master_port: and on which port; 0 for a free one of node 0.
        environment: variables set for the workers, above what the host has.
        worker: the arguments after `python`, the same for every worker.
        resolved: the configuration, as `encode_resolved` writes it; a worker finds it in a file that the
            user alone can read, named by `--resolved PATH`. Empty for a program that takes none.
        working_directory: where the workers run.
        log_dir: where nodes write the output of ranks that the terminal does not show; None for nowhere.
        gpus: GPUs of each host; 0 means that a slot is a process on the CPU, None that each host finds out.
        bind_cores: tie each worker to its share of the host's cores.
        detect_nvlink_pairs: order each host's devices so that pairs joined by NVLink are neighbours.
        stop_timeout: seconds that workers get to save after a request to stop.
        hang_timeout: seconds without progress after which a hang is reported; None never.
        output: `rank0`: the terminal shows rank 0's output; `all`: that of all ranks, with host and rank.
    """

    hosts: tuple[Host, ...]
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
    output: str = "rank0"

    @property
    def num_workers(self) -> int:
        """Workers in all."""
        return sum(len(host.slots) for host in self.hosts)

    def to_json(self) -> str:
        """As one line of text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote."""
        fields = json.loads(text)
        hosts = tuple(Host(host["name"], tuple(host["slots"])) for host in fields["hosts"])
        return cls(**{**fields, "hosts": hosts, "worker": tuple(fields["worker"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What one node stands for in the launch.

    Args:
        node: number of its host.
        ranks: of the workers that it starts; under MPI one.
        local_rank: of the first of them.
        is_mpi: MPI has started it, and it starts its worker itself.
        shares_terminal: it uses the launcher's own terminal.
    """

    node: int
    ranks: tuple[int, ...]
    local_rank: int
    is_mpi: bool
    shares_terminal: bool

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """What `dataclasses.asdict` and JSON have made of one."""
        return cls(**{**fields, "ranks": tuple(fields["ranks"])})

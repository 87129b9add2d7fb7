"""How a node starts its workers: PyTorch's agent for all of a host, or, under MPI, one worker by itself."""

import sys
from collections.abc import Sequence

from neox_launcher.orders import Orders, Place

__all__ = ["agent_command", "mpi_variables", "seat_command"]

_SEAT = ("-m", "neox_launcher.seat")


def agent_command(orders: Orders, place: Place, address: str, port: int, program: Sequence[str]) -> list[str]:
    """`torch.distributed.run` with static rendezvous, without restarts of its own.

    Args:
        orders: of the launch.
        place: of this host.
        address: where rank 0 waits.
        port: and on which port.
        program: the arguments after `python`.
    """
    return [
        *(sys.executable, "-m", "neox_launcher.torch_agent"),
        f"--nnodes={len(orders.hosts)}",
        f"--node-rank={place.node}",
        f"--nproc-per-node={len(place.ranks)}",
        f"--master-addr={address}",
        f"--master-port={port}",
        "--max-restarts=0",
        *(*_SEAT, *program),
    ]


def seat_command(program: Sequence[str]) -> list[str]:
    """One worker without an agent; `mpi_variables` tell it who it is."""
    return [sys.executable, "-u", *_SEAT, *program]


def mpi_variables(orders: Orders, place: Place, address: str, port: int) -> dict[str, str]:
    """What `torch.distributed.run` would set for a worker, from the plan.

    Args:
        orders: of the launch.
        place: of this rank.
        address: where rank 0 waits.
        port: and on which port.
    """
    return {
        "RANK": str(place.ranks[0]),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(orders.num_workers),
        "LOCAL_WORLD_SIZE": str(len(orders.hosts[place.node].slots)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }

"""Environment variables of the workers of one host: devices, threads, ranks and those in the orders."""

import subprocess
from collections.abc import Mapping, Sequence

from neox_config.errors import LaunchError
from neox_launcher.protocol.orders import AgentOrders, Place
from neox_launcher.resources.local_gpus import count_gpus
from neox_launcher.resources.nvlink import pair_devices
from neox_launcher.worker.ranks import TORCHRUN_STORE_VARIABLE

__all__ = ["place_variables", "worker_environment"]

_DEVICES = "CUDA_VISIBLE_DEVICES"
# Entries of PyTorch's flight recorder, which keeps the last collectives of each process for hang reports.
_RECORDED_COLLECTIVES = "200"
_TOPOLOGY_SECONDS = 30.0


def worker_environment(
    orders: AgentOrders, slots: Sequence[int], *, own: Mapping[str, str], cores: int
) -> dict[str, str]:
    """Return the environment variables that all workers of this host share.

    Args:
        orders: orders of the launch; their variables take precedence over those of the host.
        slots: slots of this host, one worker each.
        own: environment of the host.
        cores: CPU cores available to the workers, divided among them as OMP_NUM_THREADS unless it is set.

    Raises:
        LaunchError: the host has fewer devices than it has slots.
    """
    environment = {**own, **orders.environment}
    # Set if the launcher runs inside torchrun; the workers would wait for a store that does not exist.
    environment.pop(TORCHRUN_STORE_VARIABLE, None)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // len(slots))))
    if orders.hang_timeout is not None or orders.first_iteration_timeout is not None:
        environment.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED_COLLECTIVES)
    gpus = count_gpus(own) if orders.gpus is None else orders.gpus
    if gpus:
        environment[_DEVICES] = ",".join(_devices(orders, slots, own, gpus))
    return environment


def place_variables(place: Place, address: str, port: int) -> dict[int, dict[str, str]]:
    """Return for each rank the variables with its place in the job, named as in `torchrun`.

    Args:
        place: place of this agent.
        address: address of rank 0.
        port: port of rank 0.
    """
    return {
        rank: {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(place.num_workers),
            "LOCAL_WORLD_SIZE": str(len(place.slots)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        for local_rank, rank in enumerate(place.ranks, start=place.local_rank)
    }


def _devices(orders: AgentOrders, slots: Sequence[int], own: Mapping[str, str], gpus: int) -> tuple[str, ...]:
    """Return the devices of the slots: slot i is the i-th visible device."""
    named = [name.strip() for name in own.get(_DEVICES, "").split(",") if name.strip()]
    visible = (named or [str(number) for number in range(gpus)])[:gpus]
    missing = [slot for slot in slots if slot >= len(visible)]
    if missing:
        raise LaunchError(
            f"slot {missing[0]} is requested, but {len(visible)} GPU{'s are' if len(visible) > 1 else ' is'} "
            f"visible here (slots count from 0); correct the hostfile, or check {_DEVICES} and nvidia-smi",
            code="missing-slot",
        )
    devices = tuple(visible[slot] for slot in slots)
    return pair_devices(_topology(), devices) if orders.detect_nvlink_pairs else devices


def _topology() -> str:
    try:
        return subprocess.run(
            ["nvidia-smi", "topo", "-m"],
            capture_output=True,
            text=True,
            timeout=_TOPOLOGY_SECONDS,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"detect-nvlink-pairs: nvidia-smi topo -m cannot be run here: {error}; check the GPUs and the "
            "driver of this host, or leave it out",
            code="no-nvidia-smi",
        ) from error

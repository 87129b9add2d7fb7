"""What the workers of one host find in their environment: devices, threads, and what the orders say."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from neox_launcher.errors import LaunchError
from neox_launcher.orders import Orders
from neox_launcher.resources.local_gpus import count_gpus
from neox_launcher.resources.nvlink import pair_devices

__all__ = ["worker_environment"]

_DEVICES = "CUDA_VISIBLE_DEVICES"
# Entries of PyTorch's flight recorder, the newest collectives of each process: what a hang report reads.
_RECORDED_COLLECTIVES = "200"


def worker_environment(
    orders: Orders, slots: Sequence[int], *, own: Mapping[str, str], cores: int
) -> dict[str, str]:
    """The environment of this host's workers.

    Args:
        orders: of the launch; its variables win over the host's own.
        slots: of this host, one worker each.
        own: the host's own variables.
        cores: that this host's workers may use, shared out as OMP_NUM_THREADS unless that is set.

    Raises:
        LaunchError: the host has fewer devices than it has slots.
    """
    environment = {**own, **orders.environment}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // len(slots))))
    if orders.hang_timeout is not None:
        environment.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED_COLLECTIVES)
    gpus = count_gpus(own) if orders.gpus is None else orders.gpus
    if gpus:
        environment[_DEVICES] = ",".join(_devices(orders, slots, own, gpus))
    return environment


def _devices(orders: Orders, slots: Sequence[int], own: Mapping[str, str], gpus: int) -> tuple[str, ...]:
    """Slot i is the i-th device that the host lets us see."""
    named = [name.strip() for name in own.get(_DEVICES, "").split(",") if name.strip()]
    visible = (named or [str(number) for number in range(gpus)])[:gpus]
    missing = [slot for slot in slots if slot >= len(visible)]
    if missing:
        raise LaunchError(
            f"slot {missing[0]} is asked for, but {len(visible)} GPU{'s are' if len(visible) > 1 else ' is'} "
            f"visible here (slots count from 0); mend the hostfile, or look at {_DEVICES} and nvidia-smi"
        )
    devices = tuple(visible[slot] for slot in slots)
    return pair_devices(_topology(), devices) if orders.detect_nvlink_pairs else devices


def _topology() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        raise LaunchError("detect-nvlink-pairs: there is no nvidia-smi here; leave it out")
    shown = subprocess.run([command, "topo", "-m"], capture_output=True, text=True, timeout=30, check=False)
    return shown.stdout

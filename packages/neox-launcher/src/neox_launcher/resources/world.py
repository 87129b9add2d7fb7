"""The hosts and slots of a job in the order of ranks, and checks of their devices."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from neox_config import NeoXConfig
from neox_config.derive.problems import placed
from neox_config.facts.fused_operators import FUSED_OPERATORS
from neox_config.pluralize import pluralize
from neox_config.problems import Problem
from neox_launcher.resources.host import Host

__all__ = ["World", "missing_devices", "slow_without_gpus"]

_QUANTIZED = "zero_optimization.zero_quantized_weights"


@dataclass(frozen=True, slots=True)
class World:
    """All workers of a job.

    Args:
        hosts: in the order of ranks: host 0 has the ranks from 0 to its number of slots - 1, and so on.
        gpus: GPUs per host; 0 if slots are CPU processes, None if each host counts its own.
    """

    hosts: tuple[Host, ...]
    gpus: int | None

    @property
    def size(self) -> int:
        """Number of workers."""
        return sum(len(host.slots) for host in self.hosts)

    def with_ranks(self) -> list[tuple[Host, range]]:
        """Return each host with the ranks of its workers, in the order of its slots."""
        ends = itertools.accumulate(len(host.slots) for host in self.hosts)
        return [(host, range(end - len(host.slots), end)) for host, end in zip(self.hosts, ends, strict=True)]


def missing_devices(config: NeoXConfig, world: World) -> list[Problem]:
    """Return the problems of a configuration that needs devices which this host lacks.

    Other hosts check their own devices.
    """
    problems = []
    highest = max(slot for host in world.hosts for slot in host.slots)
    if world.gpus and highest >= world.gpus:
        have = pluralize(world.gpus, "GPU is", "GPUs are")
        what = f"assigns slot {highest} to this machine, but only {have} visible"
        problems.append(Problem("hostfile", what, f"use slots below {world.gpus}"))
    if config.parallelism.distributed_backend == "mpi":
        problems.append(
            Problem(
                "distributed_backend",
                "is not supported: PyTorch's packages do not contain it (it requires a PyTorch compiled "
                "against an MPI), and it has not been tested with these process groups",
                "use nccl or gloo; to start the workers by MPI, set launcher: openmpi, mvapich or mpich",
            )
        )
    if world.gpus == 0:
        problems += _without_gpus(config)
    return [placed(config, problem) for problem in problems]


def slow_without_gpus(config: NeoXConfig, world: World) -> list[Problem]:
    """Return notes about settings that are slow without GPUs."""
    if world.gpus != 0 or not config.precision.is_fp16:
        return []
    setting = _setting_of_fp32(config)
    remedy = f"unless this is a test of fp16, use fp32: --set {setting}"
    return [placed(config, Problem(setting.partition("=")[0], "is slow without GPUs", remedy))]


def _setting_of_fp32(config: NeoXConfig) -> str:
    """Return the setting that replaces fp16 by fp32."""
    return "precision=fp32" if config.precision.precision == "fp16" else "fp16.enabled=false"


def _without_gpus(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the settings that require a GPU."""
    if config.parallelism.distributed_backend == "nccl":
        faster = (
            f" --set {_setting_of_fp32(config)} (fp16 is slow on CPUs)" if config.precision.is_fp16 else ""
        )
        yield Problem(
            "distributed_backend",
            "requires GPUs, but none are visible on this host",
            f"use CPUs with --set distributed-backend=gloo{faster}, or check CUDA_VISIBLE_DEVICES and "
            "nvidia-smi",
        )
    if config.value_of(_QUANTIZED):
        yield Problem(
            _QUANTIZED,
            "requires NVIDIA GPUs for DeepSpeed's operator quantizer, but none are visible on this host",
            "remove it, or check CUDA_VISIBLE_DEVICES and nvidia-smi",
        )
    for name in FUSED_OPERATORS:
        if config.value_of(name) is True:
            yield Problem(
                name,
                "requires NVIDIA GPUs for its fused operator, but none are visible on this host",
                f"set {name.replace('_', '-')}: auto or false, or check CUDA_VISIBLE_DEVICES",
            )

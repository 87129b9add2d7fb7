"""Hosts and their slots, in the order of ranks."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from neox_launcher.config import NeoXConfig
from neox_launcher.config.problems import Problem, in_words, place_of
from neox_launcher.resources.host import Host

__all__ = ["World", "missing_devices", "slow_without_gpus"]

_FUSIONS = (
    "scaled_upper_triang_masked_softmax_fusion",
    "scaled_masked_softmax_fusion",
    "bias_gelu_fusion",
    "bias_dropout_fusion",
    "rope_fusion",
    "layernorm_fusion",
)


@dataclass(frozen=True, slots=True)
class World:
    """Every worker of a job.

    Args:
        hosts: in the order of ranks: host 0 has ranks 0 to its number of slots - 1, and so on.
        gpus: GPUs of each host; 0 means that a slot is a process on the CPU, None that each host finds out.
    """

    hosts: tuple[Host, ...]
    gpus: int | None

    @property
    def size(self) -> int:
        """Workers in all."""
        return sum(len(host.slots) for host in self.hosts)

    def with_ranks(self) -> list[tuple[Host, range]]:
        """Each host with the ranks of its workers, in the order of its slots."""
        ends = itertools.accumulate(len(host.slots) for host in self.hosts)
        return [(host, range(end - len(host.slots), end)) for host, end in zip(self.hosts, ends, strict=True)]


def missing_devices(config: NeoXConfig, world: World) -> list[Problem]:
    """What the configuration needs of this host's devices and does not find.

    What other hosts lack, they find out themselves.
    """
    problems = []
    highest = max(slot for host in world.hosts for slot in host.slots)
    if world.gpus and highest >= world.gpus:
        have = f"{world.gpus} GPU{'s' if world.gpus > 1 else ''}"
        what = (
            f"gives this machine slot {highest}, and only {have} {'are' if world.gpus > 1 else 'is'} visible"
        )
        problems.append(Problem("hostfile", what, f"use slots below {world.gpus}"))
    if config.parallelism.distributed_backend == "mpi":
        problems.append(
            Problem(
                "distributed_backend",
                "is in no package of PyTorch's (it takes a PyTorch compiled against an MPI), and was never "
                "tried with these process groups",
                "use nccl or gloo; to start the workers by MPI, set launcher: openmpi, mvapich or mpich",
            )
        )
    if world.gpus == 0:
        problems += _without_gpus(config)
    return [
        problem.located(place_of(config.sources, problem.name), in_words(config.value_of(problem.name)))
        for problem in problems
    ]


def slow_without_gpus(config: NeoXConfig, world: World) -> list[Problem]:
    """Notes about settings that work without GPUs, and take longer there than others would."""
    if world.gpus != 0 or not config.precision.is_fp16:
        return []
    name = "precision" if config.precision.precision == "fp16" else "fp16.enabled"
    note = Problem(name, "is slow without GPUs", "use bfloat16 or fp32 unless this is a test of fp16")
    return [note.located(place_of(config.sources, name), in_words(config.value_of(name)))]


def _without_gpus(config: NeoXConfig) -> Iterator[Problem]:
    """What the configuration asks for that a CPU does not have."""
    if config.parallelism.distributed_backend == "nccl":
        yield Problem(
            "distributed_backend",
            "needs GPUs, and this host has none that are visible",
            "leave it out (gloo is used then), or look at CUDA_VISIBLE_DEVICES and nvidia-smi",
        )
    for name in _FUSIONS:
        if config.value_of(name) is True:
            yield Problem(
                name,
                "asks for a fused operator, which needs NVIDIA GPUs, and this host has none that are visible",
                f"set {name.replace('_', '-')}: auto or false, or look at CUDA_VISIBLE_DEVICES",
            )

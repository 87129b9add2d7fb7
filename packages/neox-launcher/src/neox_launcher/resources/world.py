"""Hosts and their slots, in the order of ranks."""

from dataclasses import dataclass

from neox_launcher.config import NeoXConfig
from neox_launcher.config.problems import Problem, in_words, place_of
from neox_launcher.resources.host import Host

__all__ = ["Host", "World", "local_world", "missing_devices"]

_ALL = -1
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
        gpus: GPUs of each host; 0 means that a slot is a process on the CPU.
    """

    hosts: tuple[Host, ...]
    gpus: int

    @property
    def size(self) -> int:
        """Workers in all."""
        return sum(len(host.slots) for host in self.hosts)


def local_world(config: NeoXConfig, *, gpus: int) -> World:
    """This host alone, with as many slots as the configuration asks for.

    Args:
        config: says `num_gpus`.
        gpus: GPUs that this host has; without any, slots are processes and one is the default.
    """
    asked = config.launch.num_gpus
    slots = (gpus or 1) if asked in (None, _ALL) else asked
    return World(hosts=(Host("localhost", tuple(range(slots))),), gpus=gpus)


def missing_devices(config: NeoXConfig, world: World) -> list[Problem]:
    """What the configuration needs of this host's devices and does not find."""
    problems = []
    most = max(len(host.slots) for host in world.hosts)
    if world.gpus and most > world.gpus:
        have = f"{world.gpus} GPU{'s' if world.gpus > 1 else ''}"
        problems.append(
            Problem("num_gpus", f"is more than the {have} of this host", f"use at most {world.gpus}")
        )
    if not world.gpus and config.parallelism.distributed_backend == "nccl":
        problems.append(
            Problem(
                "distributed_backend",
                "needs GPUs, and this host has none that are visible",
                "leave it out (gloo is used then), or look at CUDA_VISIBLE_DEVICES and nvidia-smi",
            )
        )
    if not world.gpus:
        problems += [
            Problem(
                name,
                "asks for a fused operator, which needs NVIDIA GPUs, and this host has none that are visible",
                f"set {name.replace('_', '-')}: auto or false, or look at CUDA_VISIBLE_DEVICES",
            )
            for name in _FUSIONS
            if config.value_of(name) is True
        ]
    return [
        problem.located(place_of(config.sources, problem.name), in_words(config.value_of(problem.name)))
        for problem in problems
    ]

"""What will run where, decided before anything runs: pure, printable, comparable."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from neox_launcher.config import Resolved, encode_resolved
from neox_launcher.resources.world import World

__all__ = ["PROGRAMS", "LaunchPlan", "make_plan"]

# The programs of neox-model that a launch can start, by name: nothing of it is imported here.
PROGRAMS: Mapping[str, str] = {
    "train": "neox_model.train",
    "generate": "neox_model.generate",
    "evaluate": "neox_model.evaluate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A launch, ready to be carried out or shown.

    Args:
        program: key of PROGRAMS.
        world: hosts and slots.
        master_addr: where rank 0 waits.
        master_port: and on which port.
        environment: variables that are set for the workers.
        worker: the arguments after `python`, the same for every worker.
        resolved: the configuration that the workers get.
    """

    program: str
    world: World
    master_addr: str
    master_port: int
    environment: Mapping[str, str]
    worker: tuple[str, ...]
    resolved: Resolved

    def describe(self) -> str:
        """The plan as a table."""
        rows = [(name, value) for name, value in self._rows() if value]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _rows(self) -> list[tuple[str, str]]:
        config, derived = self.resolved.config, self.resolved.derived
        device = "GPU" if self.world.gpus else "CPU process"
        model = config.model
        return [
            ("program", f"python -m {PROGRAMS[self.program]}"),
            ("configuration", " + ".join(config.files)),
            ("workers", f"{self.world.size}, one per {device}"),
            *((f"  {host.name}", f"slots {', '.join(map(str, host.slots))}") for host in self.world.hosts),
            ("rendezvous", f"{self.master_addr}:{self.master_port}"),
            (
                "parallel sizes",
                f"data {derived.data_parallel_size} x pipe {derived.pipe_parallel_size} x "
                f"model {derived.model_parallel_size}, ZeRO stage {config.zero.zero_optimization.stage}",
            ),
            (
                "batch",
                f"{derived.train_batch_size:,} samples = micro-batch {derived.micro_batch_size} x "
                f"accumulation {derived.accumulation} x data {derived.data_parallel_size}; "
                f"{derived.train_batch_size * model.seq_length:,} tokens",
            ),
            ("iterations", f"{config.training.train_iters:,}" if self.program == "train" else ""),
            (
                "model",
                f"{model.num_layers} layers, width {model.hidden_size:,}, {model.num_attention_heads} heads, "
                f"{model.seq_length:,} tokens, {config.attention.pos_emb} positions",
            ),
            ("precision", derived.precision),
            ("checkpoints to", config.checkpoint.save or "" if self.program == "train" else ""),
            ("checkpoints from", config.checkpoint.load or ""),
            ("environment", shlex.join(f"{name}={value}" for name, value in self.environment.items())),
        ]


def make_plan(
    resolved: Resolved, world: World, *, program: str, master_addr: str, master_port: int, cores: int
) -> LaunchPlan:
    """Put a resolved configuration and a world together.

    Args:
        resolved: for as many devices as the world has slots.
        world: hosts and slots.
        program: key of PROGRAMS.
        master_addr: where rank 0 waits.
        master_port: and on which port.
        cores: of the host with the most slots, shared out among its workers as `OMP_NUM_THREADS`.
    """
    most_slots = max(len(host.slots) for host in world.hosts)
    return LaunchPlan(
        program=program,
        world=world,
        master_addr=master_addr,
        master_port=master_port,
        environment={"OMP_NUM_THREADS": str(max(1, cores // most_slots))},
        worker=("-m", PROGRAMS[program], "--resolved", encode_resolved(resolved)),
        resolved=resolved,
    )

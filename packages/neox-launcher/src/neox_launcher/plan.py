"""What will run where, decided before anything runs: pure, printable, comparable."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from neox_launcher.config import Resolved, encode_resolved
from neox_launcher.environment import shown_value
from neox_launcher.orders import Orders
from neox_launcher.resources.world import World

__all__ = ["PROGRAMS", "LaunchPlan"]

# The programs of neox-model that a launch can start, by name: nothing of it is imported here.
PROGRAMS: Mapping[str, str] = {
    "train": "neox_model.train",
    "generate": "neox_model.generate",
    "evaluate": "neox_model.evaluate",
    "doctor": "neox_model.doctor",
    "compare-trainings": "neox_model.verify",
}
_SHOWN_HOSTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A launch, ready to be carried out or shown.

    Args:
        program: key of PROGRAMS.
        launcher: key of BACKENDS.
        world: hosts and slots.
        hosts_from: where the list of hosts comes from, in words.
        devices: which devices slots stand for, in words.
        master_addr: where rank 0 waits; None for the first address that the first host reports.
        master_port: and on which port; 0 for a free one of the first host.
        environment: variables that are set for the workers, above what their host has.
        resolved: the configuration that the workers get.
        python: the interpreter, under the same path on every host.
        working_directory: where the workers run, under the same path on every host.
        launcher_args: further arguments for the program that reaches the hosts.
        bind_cores: tie each worker to its share of its host's cores.
        max_restarts: how often a failed launch begins again from the newest checkpoint.
        output: whose output the terminal shows.
    """

    program: str
    launcher: str
    world: World
    hosts_from: str
    devices: str
    master_addr: str | None
    master_port: int
    environment: Mapping[str, str] = field(repr=False)
    resolved: Resolved = field(repr=False)
    python: str
    working_directory: str
    launcher_args: tuple[str, ...] = ()
    bind_cores: bool = False
    max_restarts: int = 0
    output: Literal["rank0", "all"] = "rank0"

    @property
    def worker(self) -> tuple[str, ...]:
        """The arguments after `python`, the same for every worker."""
        return ("-m", PROGRAMS[self.program])

    @property
    def rendezvous(self) -> str:
        """Address and port of rank 0; in angle brackets what only the first host can tell."""
        first = self.world.hosts[0].name.strip("<>")
        address = self.master_addr or f"<hostname -I on {first}>"
        return f"{address}:{self.master_port or f'<a free port of {first}>'}"

    def orders(self) -> Orders:
        """What the nodes are told."""
        launch = self.resolved.config.launch
        return Orders(
            hosts=self.world.hosts,
            master_addr=self.master_addr,
            master_port=self.master_port,
            environment=dict(self.environment),
            worker=self.worker,
            resolved=encode_resolved(self.resolved),
            working_directory=self.working_directory,
            log_dir=self.resolved.config.logging.log_dir,
            gpus=self.world.gpus,
            bind_cores=self.bind_cores,
            detect_nvlink_pairs=launch.detect_nvlink_pairs,
            stop_timeout=launch.stop_timeout,
            hang_timeout=launch.hang_timeout,
            output=self.output,
        )

    def describe(self) -> str:
        """The plan as a table."""
        rows = [(name, value) for name, value in self._rows() if value]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def as_json(self) -> dict[str, Any]:
        """The plan for programs; secrets are hidden."""
        config, derived = self.resolved.config, self.resolved.derived
        return {
            "program": self.program,
            "launcher": self.launcher,
            "hosts": [
                {"name": host.name, "node": node, "slots": list(host.slots), "ranks": list(ranks)}
                for node, (host, ranks) in enumerate(self.world.with_ranks())
            ],
            "world_size": self.world.size,
            "master_addr": self.master_addr,
            "master_port": self.master_port or None,
            "python": self.python,
            "working_directory": self.working_directory,
            "worker": list(self.worker),
            "environment": {name: shown_value(name, value) for name, value in self.environment.items()},
            "bind_cores": self.bind_cores,
            "max_restarts": self.max_restarts,
            "files": list(config.files),
            "derived": derived.model_dump(mode="json"),
        }

    def _rows(self) -> Iterator[tuple[str, str]]:
        config, derived = self.resolved.config, self.resolved.derived
        model, trains = config.model, self.program == "train"
        yield "program", f"python {shlex.join(self.worker)}"
        yield "configuration", " + ".join(config.files)
        yield "workers", self._workers()
        yield from self._hosts()
        yield "devices", self.devices
        yield "started by", shlex.join([self.launcher, *self.launcher_args])
        yield "rendezvous", self.rendezvous
        yield (
            "parallel sizes",
            f"data {derived.data_parallel_size} x pipe {derived.pipe_parallel_size} x "
            f"model {derived.model_parallel_size}, ZeRO stage {config.zero.zero_optimization.stage}",
        )
        yield (
            "batch",
            f"{derived.train_batch_size:,} samples = micro-batch {derived.micro_batch_size} x "
            f"accumulation {derived.accumulation} x data {derived.data_parallel_size}; "
            f"{derived.train_batch_size * model.seq_length:,} tokens",
        )
        yield "iterations", f"{config.training.train_iters:,}" if trains else ""
        yield (
            "model",
            f"{model.num_layers} layers, width {model.hidden_size:,}, {model.num_attention_heads} heads, "
            f"{model.seq_length:,} tokens, {config.attention.pos_emb} positions",
        )
        kinds = Counter(derived.attention_types)
        yield "attention types", ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        yield "precision", derived.precision
        yield "checkpoints to", config.checkpoint.save or "" if trains else ""
        yield "checkpoints from", config.checkpoint.load or ""
        yield "restarts", f"at most {self.max_restarts}" if self.max_restarts else ""
        yield (
            "environment",
            shlex.join(f"{name}={shown_value(name, value)}" for name, value in self.environment.items()),
        )

    def _workers(self) -> str:
        device = {None: "slot", 0: "CPU process"}.get(self.world.gpus, "GPU")
        hosts = len(self.world.hosts)
        return f"{self.world.size:,} on {hosts:,} host{'s' if hosts > 1 else ''}, one per {device}"

    def _hosts(self) -> Iterator[tuple[str, str]]:
        hosts = self.world.with_ranks()
        for host, ranks in hosts[:_SHOWN_HOSTS]:
            which = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
            yield f"  {host.name}", f"{which}, slot{'s' if len(ranks) > 1 else ''} {_listed(host.slots)}"
        if len(hosts) > _SHOWN_HOSTS:
            yield "  ...", f"{len(hosts) - _SHOWN_HOSTS:,} more; all of them: --dry-run=json"
        yield "hosts from", self.hosts_from


def _listed(slots: tuple[int, ...]) -> str:
    return ", ".join(map(str, slots))

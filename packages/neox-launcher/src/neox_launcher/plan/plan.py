"""The launch plan: the processes of a launch and their hosts, decided before anything is started."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from neox_config import Resolved, encode_resolved
from neox_config.derive.generation import generation_mode
from neox_config.pluralize import pluralize
from neox_config.spec.resolve import derived_values
from neox_launcher.plan.environment import shown_value
from neox_launcher.plan.scheduler import Member
from neox_launcher.protocol.orders import Orders
from neox_launcher.resources.world import World

__all__ = ["ANY_ENDPOINT", "PROGRAMS", "Endpoint", "LaunchPlan"]

# The programs of neox-model by module name; the launcher does not import them.
PROGRAMS: Mapping[str, str] = {
    "train": "neox_model.train",
    "generate": "neox_model.generate",
    "serve": "neox_model.serve",
    "evaluate": "neox_model.evaluate",
    "index-blocks": "neox_model.extras.retrieval.index_blocks",
    "find-blocks": "neox_model.extras.retrieval.find_blocks",
    "doctor": "neox_model.doctor",
    "compare-trainings": "neox_model.verify",
    "verify-layout": "neox_model.verify_layout",
    "coord-check": "neox_model.coord_check",
}
_SHOWN_HOSTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the launcher listens, and how agents on other hosts reach it.

    Args:
        address: address or name of this machine; None for all its addresses.
        port: TCP port; 0 for a free one.
        port_from: what sets the port.
    """

    address: str | None = None
    port: int = 0
    port_from: str = "launcher-port"


ANY_ENDPOINT = Endpoint()
"""A free port on all addresses of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A launch that can be run or printed.

    Args:
        program: key of PROGRAMS.
        launcher: key of BACKENDS.
        world: hosts and slots.
        hosts_from: description of the source of the list of hosts.
        devices: description of the devices that the slots refer to.
        master_addr: address of rank 0; None for the first address that the first host reports.
        master_port: port of rank 0; 0 for a free port of the first host.
        environment: variables that are set for the workers in addition to those of their host.
        resolved: configuration of the workers.
        python: path of the interpreter, the same on every host.
        working_directory: working directory of the workers, the same path on every host.
        launcher_args: additional arguments for the program that starts the agents.
        remote_setup: shell commands that hosts run before their agents; None for none.
        remote_prefix: command with which hosts run their agents.
        bind_cores: bind each worker to its share of the host's CPU cores.
        max_restarts: maximum restarts after a failure, each from the latest checkpoint.
        output: ranks whose output is printed to the terminal.
        member: place of this process among those that a scheduler started, one per host; None if this process
            starts the agents of all hosts.
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
    remote_setup: str | None = None
    remote_prefix: tuple[str, ...] = ()
    bind_cores: bool = False
    max_restarts: int = 0
    output: Literal["rank0", "all"] = "rank0"
    member: Member | None = None

    @property
    def is_local(self) -> bool:
        """Whether the job uses only this machine and its terminal."""
        return self.launcher == "local" and self.member is None

    @property
    def this_host(self) -> int | None:
        """Number of this host in the plan; None if it is not used or not known."""
        names = [host.name for host in self.world.hosts]
        if self.is_local:
            return 0
        known = self.member is not None and self.member.name in names
        return names.index(self.member.name) if self.member is not None and known else None

    @property
    def worker(self) -> tuple[str, ...]:
        """Arguments of the Python interpreter, the same for every worker."""
        return ("-m", PROGRAMS[self.program])

    @property
    def rendezvous(self) -> str:
        """Address and port of rank 0, in angle brackets where they are known only on the first host."""
        first = self.world.hosts[0].name.strip("<>")
        address = self.master_addr or f"<hostname -I on {first}>"
        return f"{address}:{self.master_port or f'<a free port of {first}>'}"

    @property
    def endpoint(self) -> Endpoint:
        """Where agents connect."""
        if self.member is not None:
            return Endpoint(port=self.member.port, port_from="MASTER_PORT")
        launch = self.resolved.config.launch
        return Endpoint(address=launch.launcher_address, port=launch.launcher_port)

    def orders(self) -> Orders:
        """Return the orders that are sent to the agents."""
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
            first_iteration_timeout=launch.first_iteration_timeout if self.program == "train" else None,
            output=self.output,
            is_training=self.program == "train",
            is_interactive=self.program == "generate"
            and generation_mode(self.resolved.config) == "interactive",
            is_server=self.program == "serve",
        )

    def describe(self) -> str:
        """Return the plan as a table."""
        rows = [(name, value) for name, value in self._rows() if value]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON-serializable data, with secrets hidden."""
        return {
            "program": self.program,
            "launcher": self.launcher,
            "hosts": [
                {"name": host.name, "number": number, "slots": list(host.slots), "ranks": list(ranks)}
                for number, (host, ranks) in enumerate(self.world.with_ranks())
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
            "files": list(self.resolved.config.files),
            "derived": derived_values(self.resolved),
        }

    def _rows(self) -> Iterator[tuple[str, str]]:
        config, run = self.resolved.config, self.resolved.run
        layout, batch, precision = run.layout, run.batch, run.precision
        model, trains = config.model, self.program == "train"
        yield "program", f"python {shlex.join(self.worker)}"
        yield "configuration", " + ".join(config.files)
        device, hosts = {None: "slot", 0: "CPU process"}.get(self.world.gpus, "GPU"), len(self.world.hosts)
        yield "workers", f"{self.world.size:,} on {pluralize(hosts, 'host')}, one per {device}"
        yield from self._hosts()
        yield "devices", self.devices
        if self.member is None:
            yield "started by", shlex.join([self.launcher, *self.launcher_args])
        else:
            where = f"{self.member.address}:{self.member.port}"
            yield "started by", f"the scheduler; process 0 listens at {where}"
        if self.launcher != "local":
            yield "remote setup", self.remote_setup or ""
            yield "remote prefix", shlex.join(self.remote_prefix)
        yield "rendezvous", self.rendezvous
        sizes = f"data {layout.data} x pipe {layout.stages} x model {layout.tensor}"
        experts = f", experts on {layout.experts}" if layout.experts > 1 else ""
        yield "parallel sizes", f"{sizes}{experts}, ZeRO stage {layout.zero}"
        yield (
            "batch",
            f"{pluralize(batch.whole, 'sample')} = micro-batch {batch.micro} x accumulation "
            f"{batch.accumulation} x data {layout.data}; {batch.whole * batch.length:,} tokens",
        )
        epochs = config.training.train_epochs
        passes = "" if epochs is None else f" (train-epochs: {epochs:,})"
        yield "iterations", f"{config.training.iterations:,}{passes}" if trains else ""
        yield (
            "model",
            f"{pluralize(model.num_layers, 'layer')}, width {model.hidden_size:,}, "
            f"{pluralize(model.num_attention_heads, 'head')}, "
            f"{model.seq_length:,} tokens, {config.attention.pos_emb} positions",
        )
        kinds = Counter(self.resolved.model.kinds)
        yield "attention types", ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        autocast = "" if precision.autocast is None else f", products in {precision.autocast} (amp)"
        yield "precision", precision.weights + autocast
        yield "checkpoints to", config.checkpoint.save or "" if trains else ""
        yield "checkpoints from", config.checkpoint.load or ""
        yield "restarts", f"at most {self.max_restarts}" if self.max_restarts else ""
        yield (
            "environment",
            shlex.join(f"{name}={shown_value(name, value)}" for name, value in self.environment.items()),
        )

    def _hosts(self) -> Iterator[tuple[str, str]]:
        hosts = self.world.with_ranks()
        for host, ranks in hosts[:_SHOWN_HOSTS]:
            slots = ", ".join(map(str, host.slots))
            which = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
            yield f"  {host.name}", f"{which}, slot{'s' if len(ranks) > 1 else ''} {slots}"
        if len(hosts) > _SHOWN_HOSTS:
            yield "  ...", f"{len(hosts) - _SHOWN_HOSTS:,} more; use --dry-run=json to list all"
        yield "hosts from", self.hosts_from

"""The connections to the agents of a launch, and which host of the plan each one runs on."""

import ipaddress
import itertools
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from neox_config.errors import LaunchError
from neox_launcher.protocol.channel import Channel, ConnectionLostError
from neox_launcher.protocol.messages import Message, encode_message
from neox_launcher.protocol.orders import Orders, Place
from neox_launcher.resources.host import name_some

__all__ = ["AgentConnection", "Agents", "name_workers"]


@dataclass(slots=True, eq=False)
class AgentConnection:
    """The connection to one agent.

    Args:
        channel: connection to the agent.
        number: number of its host in the plan.
        host: host name as reported by the host.
        ranks: ranks of its workers.
        addresses: addresses of its host.
        clock: offset of the clock of its host from this machine's, in seconds; positive if ahead.
        is_mpi: started by MPI, one agent per rank.
        is_ready: has received its orders and can start its workers.
        has_ended: its workers have ended, or the agent is lost.
        dump: for each rank its stacks and collectives; None unless requested.
    """

    channel: Channel
    number: int
    host: str
    ranks: tuple[int, ...]
    addresses: tuple[str, ...]
    clock: float
    is_mpi: bool
    is_ready: bool = False
    has_ended: bool = False
    dump: Message | None = field(default=None, repr=False)


class Agents:
    """All agents that have connected.

    Args:
        orders: sent to each agent when it connects.
        selector: waits for all connections; the data of each registration is a callable.
        hear: called with every message of an agent.
        lose: called with an agent whose connection ended too early, and the reason.
        refuse: called with a host that is not in the plan, and the reason.
        shares_terminal: the agents use the terminal of the launcher.
    """

    def __init__(
        self,
        orders: Orders,
        selector: selectors.BaseSelector,
        *,
        hear: Callable[[AgentConnection, Message], None],
        lose: Callable[[AgentConnection, str], None],
        refuse: Callable[[str, str], None],
        shares_terminal: bool,
    ) -> None:
        self._orders, self._selector, self._shares_terminal = orders, selector, shares_terminal
        self._on_message, self._on_loss, self._on_refusal = hear, lose, refuse
        ends = itertools.accumulate(len(host.slots) for host in orders.hosts)
        self._ranks = [
            tuple(range(end - len(host.slots), end)) for host, end in zip(orders.hosts, ends, strict=True)
        ]
        self._num_workers = orders.num_workers
        self._number_of_rank = {rank: number for number, ranks in enumerate(self._ranks) for rank in ranks}
        # Also by names without a domain, which may be missing; the first of several hosts.
        numbers = list(enumerate(orders.hosts))
        self._number_of_name = {_without_domain(host.name): number for number, host in reversed(numbers)}
        self._number_of_name |= {host.name: number for number, host in numbers}
        self._encoded = encode_message("orders", {"orders": orders.for_agents()})
        self._agents: list[AgentConnection] = []
        self._present: set[int] = set()

    def __iter__(self) -> Iterator[AgentConnection]:
        return iter(self._agents)

    def __len__(self) -> int:
        return len(self._agents)

    @property
    def are_ready(self) -> bool:
        """Whether there is a ready agent for every rank."""
        return self.are_complete and all(agent.is_ready for agent in self._agents)

    @property
    def are_complete(self) -> bool:
        """Whether there is an agent for every rank, so that no other is expected."""
        return len(self._present) == self._num_workers

    @property
    def have_ended(self) -> bool:
        """Whether the workers of all agents have ended."""
        return all(agent.has_ended for agent in self._agents)

    def missing_hosts(self) -> list[int]:
        """Return the numbers of the hosts whose ranks do not all have a connected agent."""
        return [number for number, ranks in enumerate(self._ranks) if not self._present.issuperset(ranks)]

    def first_address(self) -> str:
        """Return the first address of the host of rank 0."""
        return next(agent.addresses[0] for agent in self._agents if 0 in agent.ranks)

    def on_connected(self, channel: Channel, hello: Message) -> None:
        """Register an agent that has connected, and send it its orders."""
        host = str(hello["host"])
        try:
            number, ranks = self._place_of(hello)
        except LaunchError as error:
            self._on_refusal(host, str(error))
            channel.close()
            return
        agent = AgentConnection(
            channel=channel,
            number=number,
            host=host,
            ranks=ranks,
            addresses=tuple(hello["addresses"]),
            clock=float(hello["time"]) - time.time(),
            is_mpi=hello["rank"] is not None,
        )
        self._agents.append(agent)
        self._present.update(ranks)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._pass_on(agent, read=True))
        place = Place(
            slots=self._orders.hosts[number].slots,
            ranks=ranks,
            local_rank=ranks[0] - self._ranks[number][0],
            num_workers=self._num_workers,
            is_mpi=agent.is_mpi,
            shares_terminal=self._shares_terminal,
        )
        self._send_encoded(agent, self._encoded)
        self.send(agent, "place", {"place": asdict(place)})
        self._pass_on(agent, read=False)

    def send(self, agent: AgentConnection, kind: str, content: Message | None = None) -> None:
        """Send a message to one agent; report the agent as lost if that fails."""
        self._send_encoded(agent, encode_message(kind, content or {}))

    def send_all(self, kind: str, content: Message | None = None) -> None:
        """Send a message to all connected agents."""
        encoded = encode_message(kind, content or {})
        for agent in self._agents:
            self._send_encoded(agent, encoded)

    def close(self) -> None:
        """Close all connections."""
        for agent in self._agents:
            agent.channel.close()

    def _pass_on(self, agent: AgentConnection, *, read: bool) -> None:
        """Pass on the messages of an agent that have arrived completely, reading more of them or not."""
        try:
            if read:
                agent.channel.read()
            for message in agent.channel.messages():
                self._on_message(agent, message)
        except ConnectionLostError as error:
            self._lose(agent, str(error))

    def _send_encoded(self, agent: AgentConnection, encoded: bytes) -> None:
        try:
            agent.channel.send_encoded(encoded)
        except ConnectionLostError as error:
            self._lose(agent, str(error))

    def _lose(self, agent: AgentConnection, reason: str) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(agent.channel)
        agent.channel.close()
        if not agent.has_ended:
            agent.has_ended = True
            self._on_loss(agent, reason)

    def _place_of(self, hello: Message) -> tuple[int, tuple[int, ...]]:
        """Return the number of the host and the ranks of an agent.

        Raises:
            LaunchError: they are not in the plan, or another agent has them already.
        """
        what = next((name for name in ("rank", "number", "name") if hello[name] is not None), None)
        if what is None:
            raise LaunchError("it reports neither a rank nor a host")
        shown = f"it reports as {'host' if what == 'number' else what} {hello[what]}"
        if what == "rank":
            number = self._number_of_rank.get(hello["rank"])
        elif what == "number":
            number = hello["number"] if 0 <= hello["number"] < len(self._ranks) else None
        else:
            short = self._number_of_name.get(_without_domain(hello["name"]))
            number = self._number_of_name.get(hello["name"], short)
        if number is None:
            raise LaunchError(f"{shown}, which is not in the plan")
        ranks = (int(hello["rank"]),) if what == "rank" else self._ranks[number]
        if not self._present.isdisjoint(ranks):
            raise LaunchError(f"{shown}, but another agent has already done so")
        return number, ranks


def name_workers(ranks: Sequence[int]) -> str:
    """Return `worker 3` or `workers 3, 4`."""
    return f"worker{'s' if len(ranks) > 1 else ''} {name_some(ranks)}"


def _without_domain(name: str) -> str:
    """Return a host name without its domain, which a scheduler may add or omit."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.partition(".")[0]
    return name

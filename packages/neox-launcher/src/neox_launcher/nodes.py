"""The nodes of a launch as the launcher sees them: who stands for which host, and what is said to them."""

import itertools
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from neox_launcher.control import Channel, ConnectionLostError, Message
from neox_launcher.errors import LaunchError
from neox_launcher.orders import Orders, Place

__all__ = ["Node", "Nodes", "name_hosts", "name_workers"]

_MOST_NAMED = 8


@dataclass(slots=True, eq=False)
class Node:
    """One node.

    Args:
        channel: to it.
        number: of its host in the plan.
        host: its name for itself.
        ranks: of its workers.
        addresses: its own, as it lists them.
        clock: seconds that its host's clock is ahead of this one's.
        is_mpi: MPI has started it, one for each rank.
        is_ready: it has its orders, and nothing stands in its way.
        has_ended: its workers have ended, or it is lost.
        dump: rank to what that rank was doing, when it was asked.
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


class Nodes:
    """All nodes that have reported.

    Args:
        orders: sent to each as it reports.
        selector: gets a callable as data for everything to wait for.
        hear: is given every message of a node.
        lose: is told of a node whose connection ended too early, and why.
        refuse: is told of a host that has no place in the plan, and why.
        shares_terminal: nodes use the launcher's own terminal.
    """

    def __init__(
        self,
        orders: Orders,
        selector: selectors.BaseSelector,
        *,
        hear: Callable[[Node, Message], None],
        lose: Callable[[Node, str], None],
        refuse: Callable[[str, str], None],
        shares_terminal: bool,
    ) -> None:
        self._orders, self._selector, self._shares_terminal = orders, selector, shares_terminal
        self._tell_message, self._tell_loss, self._tell_refusal = hear, lose, refuse
        ends = itertools.accumulate(len(host.slots) for host in orders.hosts)
        self._ranks = [
            tuple(range(end - len(host.slots), end)) for host, end in zip(orders.hosts, ends, strict=True)
        ]
        self._text = orders.to_json()
        self._nodes: list[Node] = []
        self._present: set[int] = set()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def are_ready(self) -> bool:
        """Whether all ranks have a node that can start them."""
        return not self.missing_hosts() and all(node.is_ready for node in self._nodes)

    @property
    def have_ended(self) -> bool:
        """Whether all workers of all nodes have."""
        return all(node.has_ended for node in self._nodes)

    def missing_hosts(self) -> list[int]:
        """Numbers of the hosts that have not reported, or not with all their ranks."""
        return [number for number, ranks in enumerate(self._ranks) if not self._present.issuperset(ranks)]

    def first_address(self) -> str:
        """Where the node of rank 0 can be reached by others."""
        return next(node.addresses[0] for node in self._nodes if 0 in node.ranks)

    def welcome(self, channel: Channel, hello: Message) -> None:
        """A node reports: give it its orders."""
        host = str(hello.get("host"))
        try:
            number, ranks = self._place_of(hello)
        except LaunchError as error:
            self._tell_refusal(host, str(error))
            channel.close()
            return
        node = Node(
            channel=channel,
            number=number,
            host=host,
            ranks=ranks,
            addresses=tuple(hello["addresses"]),
            clock=float(hello["time"]) - time.time(),
            is_mpi="rank" in hello,
        )
        self._nodes.append(node)
        self._present.update(ranks)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._hear(node))
        place = Place(
            node=number,
            ranks=ranks,
            local_rank=ranks[0] - self._ranks[number][0],
            is_mpi=node.is_mpi,
            shares_terminal=self._shares_terminal,
        )
        self.send(node, "orders", {"orders": self._text, "place": asdict(place)})

    def send(self, node: Node, kind: str, content: Message | None = None) -> None:
        """Say something to one node; one that is lost is told of."""
        try:
            node.channel.send(kind, **(content or {}))
        except ConnectionLostError as error:
            self._lose(node, str(error))

    def send_all(self, kind: str, content: Message | None = None) -> None:
        """Say something to all nodes that are there."""
        for node in self._nodes:
            self.send(node, kind, content)

    def close(self) -> None:
        """Hang up."""
        for node in self._nodes:
            node.channel.close()

    def _hear(self, node: Node) -> None:
        try:
            for message in node.channel.receive():
                self._tell_message(node, message)
        except ConnectionLostError as error:
            self._lose(node, str(error))

    def _lose(self, node: Node, reason: str) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(node.channel)
        node.channel.close()
        if not node.has_ended:
            node.has_ended = True
            self._tell_loss(node, reason)

    def _place_of(self, hello: Message) -> tuple[int, tuple[int, ...]]:
        """The host and the ranks that a node stands for.

        Raises:
            LaunchError: none, or somebody else stands for them.
        """
        what = next((name for name in ("rank", "node", "name") if name in hello), "nobody")
        shown = f"it reports as {what} {hello.get(what, '')}"
        number = self._number_of(what, hello)
        if number is None:
            raise LaunchError(f"{shown}, which is not in the plan")
        ranks = (int(hello["rank"]),) if what == "rank" else self._ranks[number]
        if not self._present.isdisjoint(ranks):
            raise LaunchError(f"{shown}, and so does another host")
        return number, ranks

    def _number_of(self, what: str, hello: Message) -> int | None:
        if what == "rank":
            matches = [hello["rank"] in ranks for ranks in self._ranks]
        elif what == "node":
            matches = [number == hello["node"] for number in range(len(self._ranks))]
        else:
            matches = [_is_same_host(host.name, str(hello.get("name"))) for host in self._orders.hosts]
        return matches.index(True) if True in matches else None


def name_hosts(names: Sequence[str]) -> str:
    """`worker-1, worker-2`; of many only the first."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def name_workers(ranks: Sequence[int]) -> str:
    """`worker 3`, `workers 3, 4`."""
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _is_same_host(one: str, other: str) -> bool:
    """A scheduler may add the domain or leave it out."""
    return one == other or one.partition(".")[0] == other.partition(".")[0]

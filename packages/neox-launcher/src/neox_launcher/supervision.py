"""Keeping watch over a launch: its nodes, signals, the first failure, and an end within seconds.

The cluster's tools start one node per host (under MPI one per rank), which reports back over a control
connection and does what is said there. torch's own agents do not tell each other of a death: a rank that
is killed on one host leaves the others waiting for half an hour. Here all end within seconds.
"""

import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from neox_launcher.backends.base import Command, Contact
from neox_launcher.control import Message, new_token
from neox_launcher.hang import HangWatch, report_hang
from neox_launcher.nodes import Node, Nodes, name_hosts, name_workers
from neox_launcher.orders import Orders
from neox_launcher.outcome import HEAD_START_SECONDS, Failure, Outcome, judge
from neox_launcher.reception import Reception
from neox_launcher.run_folder import run_folder
from neox_launcher.stop_signals import STOP_SIGNALS, WARNING_SIGNAL, name_of, unblock_warning
from neox_launcher.terminal import pass_on, tell
from neox_launcher.tools import Tools

__all__ = ["Failure", "Outcome", "supervise"]

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 2.0
_KILL_SECONDS = 6.0
_DUMP_SECONDS = 8.0
_PATIENCE_SECONDS = 5.0
# A scheduler that signals the whole job reaches hosts and launcher at different moments.
_SAME_REQUEST_SECONDS = 3.0
_LOCAL_ADDRESS = "127.0.0.1"


def supervise(
    commands_for: Callable[[Contact], Sequence[Command]],
    orders: Orders,
    *,
    is_local: bool,
    start_timeout: float,
) -> Outcome:
    """Start the nodes, give them their orders, and watch until all workers have ended.

    Args:
        commands_for: the commands that start nodes which report to a contact.
        orders: for the nodes.
        is_local: this machine alone works: nothing listens to the network, and rank 0 keeps the terminal.
        start_timeout: seconds until every host must have reported.

    Raises:
        LaunchError: a command cannot be started.
    """
    with run_folder() as folder, selectors.DefaultSelector() as selector:
        launch = _Launch(orders, selector, is_local=is_local, start_timeout=start_timeout)
        with launch.listening_to_signals():
            return launch.run(commands_for(launch.contact(folder)))


class _Launch:
    """What is known of one launch while it runs."""

    def __init__(
        self, orders: Orders, selector: selectors.BaseSelector, *, is_local: bool, start_timeout: float
    ) -> None:
        self._orders, self._selector, self._is_local = orders, selector, is_local
        self._start_timeout = start_timeout
        self._start_by = time.monotonic() + start_timeout
        self._nodes = Nodes(
            orders, selector, hear=self._hear, lose=self._lose, refuse=self._fail, shares_terminal=is_local
        )
        self._reception = Reception(new_token(), selector, self._nodes.welcome, is_local=is_local)
        self._failures: list[Failure] = []
        self._lost: set[int] = set()
        self._facts: dict[int, Mapping[str, Any]] = {}
        self._signals: list[int] = []
        self._told = 0
        self._relayed: tuple[int, float] | None = None
        self._is_stopping = False
        self._port: int | None = None
        self._is_started = False
        self._trouble_at: float | None = None
        self._killed_at: float | None = None
        self._hang = HangWatch(orders.hang_timeout)
        self._dump_by: float | None = None
        self._answers: Mapping[str, Callable[[Node, Message], None]] = {
            "ready": self._note_ready,
            "refused": self._note_refusal,
            "output": self._print_output,
            "progress": self._note_progress,
            "trouble": self._note_trouble,
            "signal": self._note_signal,
            "dumped": self._note_dump,
            "ended": self._note_end,
        }

    def contact(self, folder: Path) -> Contact:
        """How nodes reach this launch.

        Args:
            folder: private, for what commands read.
        """
        return Contact(
            addresses=self._reception.addresses,
            port=self._reception.port,
            token=self._reception.token,
            folder=str(folder),
        )

    @contextmanager
    def listening_to_signals(self) -> Iterator[None]:
        """Remember the signals that ask for a stop instead of dying of them."""
        # A lost connection counts as a request to stop, unless nohup says that it shall not.
        numbers = [
            number
            for number in STOP_SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        ]
        before = {number: signal.signal(number, self._remember) for number in numbers}
        mask = unblock_warning()
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        # A scheduler that signals every process of a job reaches the nodes, too, and they may be first.
        is_same_request = (
            number != signal.SIGINT
            and self._relayed is not None
            and self._relayed[0] == number
            and time.monotonic() - self._relayed[1] < _SAME_REQUEST_SECONDS
        )
        if not is_same_request:
            self._signals.append(number)

    def run(self, commands: Sequence[Command]) -> Outcome:
        """Until all nodes have told how it ended, or cannot any more."""
        try:
            tools = Tools(commands, self._selector, shares_terminal=self._is_local)
            try:
                while not self._is_over():
                    self._turn(tools)
                self._note_silence()
            finally:
                self._reception.close()
                self._nodes.send_all("leave")
                tools.end(patience=_PATIENCE_SECONDS if len(self._nodes) else 0.0)
        finally:
            self._reception.close()
            self._nodes.close()
        return replace(
            judge(self._failures, self._signals),
            facts=self._facts,
            has_started=self._is_started,
            lost_hosts=tuple(self._orders.hosts[number].name for number in sorted(self._lost)),
        )

    def _turn(self, tools: Tools) -> None:
        for key, _ in self._selector.select(timeout=_POLL_SECONDS):
            key.data()
        self._pass_signals_on()
        if not self._is_started and self._killed_at is None:
            self._get_started(tools)
        self._look_for_hang()
        if self._trouble_at is not None and time.monotonic() - self._trouble_at > _GRACE_SECONDS:
            self._kill()

    def _is_over(self) -> bool:
        if self._killed_at is not None and time.monotonic() - self._killed_at > _KILL_SECONDS:
            return True
        return self._nodes.have_ended if self._is_started else self._killed_at is not None

    # Starting

    def _get_started(self, tools: Tools) -> None:
        """Start the workers once every host is ready; give up on hosts that cannot come any more."""
        if self._nodes.are_ready:
            tools.talk()
            # One host needs no network.
            own = _LOCAL_ADDRESS if len(self._orders.hosts) == 1 else self._nodes.first_address()
            self._is_started = True
            place = {"master_addr": self._orders.master_addr or own, "master_port": self._port}
            self._nodes.send_all("start", place)
            return
        missing = self._nodes.missing_hosts()
        lost = [number for number in missing if tools.has_given_up_on(number)]
        if lost:
            self._give_up_on(lost, "could not be started", tools)
        elif time.monotonic() > self._start_by:
            self._give_up_on(missing, f"did not report within {self._start_timeout:g} s", tools)

    def _give_up_on(self, missing: Sequence[int], why: str, tools: Tools) -> None:
        # Where none comes, it is the tool that fails.
        self._lost.update(missing if len(missing) < len(self._orders.hosts) else ())
        names = name_hosts([self._orders.hosts[number].name for number in missing])
        said = tools.said(missing[0] if len(missing) == 1 else None)
        self._fail("", f"{names}: {why}; " + (f"what was said:\n{said}" if said else "nothing was said"))
        self._kill()

    # What nodes say

    def _hear(self, node: Node, message: Message) -> None:
        self._answers[message["kind"]](node, message)

    def _lose(self, node: Node, reason: str) -> None:
        self._hang.forget(node.ranks)
        if self._killed_at is not None:
            return
        # An MPI ends its other processes when one is gone.
        if not (node.is_mpi and self._lost):
            self._lost.add(node.number)
        what = f"it is lost ({reason}), with {name_workers(node.ranks)}; what it still runs ends by itself"
        self._fail(node.host, what + self._remedy_for_loss(node))

    def _remedy_for_loss(self, node: Node) -> str:
        if len(self._orders.hosts) == 1:
            return ""
        name = self._orders.hosts[node.number].name
        return (
            ". See whether it is up, and what its kernel log says; to go on without it, start again with "
            f"exclude: {name} (with elasticity, --max-restarts does that)"
        )

    def _note_silence(self) -> None:
        """Hosts that have not even told that their workers are ended."""
        if self._is_started:
            self._lost.update(node.number for node in self._nodes if not node.has_ended)

    def _note_ready(self, node: Node, message: Message) -> None:
        node.is_ready = True
        if message["port"] is not None:
            self._port = int(message["port"])

    def _note_refusal(self, node: Node, message: Message) -> None:
        self._fail(node.host, str(message["message"]), exit_code=2)
        self._kill()

    def _note_progress(self, node: Node, message: Message) -> None:
        for rank, iteration in message["ranks"].items():
            self._hang.hear(int(rank), int(iteration))

    def _note_trouble(self, node: Node, message: Message) -> None:
        self._trouble_at = self._trouble_at or time.monotonic()

    def _note_signal(self, node: Node, message: Message) -> None:
        # A scheduler signals all nodes at once: together that is one request. An MPI whose process is gone
        # ends the others by a signal, too: nobody has asked for that.
        if not self._signals and not (node.is_mpi and self._lost):
            number = int(message["number"])
            self._relayed = number, time.monotonic()
            self._signals.append(number)

    def _note_dump(self, node: Node, message: Message) -> None:
        node.dump = message["ranks"]

    def _note_end(self, node: Node, message: Message) -> None:
        node.has_ended = True
        self._hang.forget(node.ranks)
        if message["failures"]:
            self._failures += [Failure.from_message(failure) for failure in message["failures"]]
            self._note_trouble(node, message)
        for rank, facts in message["facts"].items():
            self._facts[int(rank)] = {**facts, "host": node.host, "clock": node.clock}
        if message["overran"]:
            tell(
                f"{name_workers(message['overran'])} on {node.host} had not saved within "
                f"{self._orders.stop_timeout:g} s (stop-timeout) and had to be ended\n"
            )

    def _print_output(self, node: Node, message: Message) -> None:
        data = str(message["text"]).encode("utf-8", errors="surrogateescape")
        if self._orders.output == "all":
            prefix = f"{node.host} {message['rank']}: ".encode()
            data = b"".join(prefix + line + b"\n" for line in data.rstrip(b"\n").split(b"\n"))
        pass_on(sys.stdout if message["stream"] == "stdout" else sys.stderr, data)

    # Ending

    def _fail(self, host: str, message: str, *, exit_code: int = 1) -> None:
        """Something that is not one worker's failure; it ends the launch."""
        self._failures.append(
            Failure(
                rank=None,
                host=host,
                time=time.time() - HEAD_START_SECONDS,
                message=message,
                exit_code=exit_code,
                unreported=True,
            )
        )
        self._trouble_at = self._trouble_at or time.monotonic()

    def _kill(self) -> None:
        if self._killed_at is None:
            self._killed_at = time.monotonic()
            self._nodes.send_all("kill")

    def _pass_signals_on(self) -> None:
        signals = tuple(self._signals)
        if len(signals) <= self._told:
            return
        self._told = len(signals)
        last = name_of(signals[-1])
        # Schedulers repeat their warning: it is never the second request, which ends all at once.
        if sum(number != WARNING_SIGNAL for number in signals) > 1:
            self._kill()
        elif not self._is_started:
            tell(f"\n{last} received before the workers were started: ending\n")
            self._kill()
        elif not self._is_stopping:
            self._is_stopping = True
            hint = "" if signals[-1] == WARNING_SIGNAL else "; once more to stop at once"
            tell(f"\n{last} received: stopping after this iteration{hint}\n")
            self._nodes.send_all("stop", {"number": signals[0]})
        elif signals[-1] != WARNING_SIGNAL:
            tell(f"\n{last} received: already stopping; once more to stop at once\n")

    def _look_for_hang(self) -> None:
        if self._killed_at is not None or self._signals:
            return
        running = [node for node in self._nodes if not node.has_ended]
        if self._dump_by is None:
            if self._hang.has_stalled(self._orders.num_workers):
                self._dump_by = time.monotonic() + _DUMP_SECONDS
                for node in running:
                    self._nodes.send(node, "dump")
        elif time.monotonic() > self._dump_by or all(node.dump is not None for node in running):
            self._lost.update(node.number for node in running if node.dump is None)
            self._fail("", report_hang(self._orders, self._nodes, self._hang))
            self._kill()

"""The main loop of a launch: connects agents, forwards signals, and ends all workers after a failure.

The cluster's tools start one agent per host (under MPI one per rank), which connects back to the launcher and
receives its orders. If a worker dies, the ranks on other hosts would wait for it until a collective times
out, for up to half an hour. The main loop ends them within seconds.
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

from neox_config.finite_json import restored
from neox_config.pluralize import pluralize
from neox_launcher.backends.base import Command, Contact
from neox_launcher.controller.agents import AgentConnection, Agents, name_workers
from neox_launcher.controller.display import Display
from neox_launcher.controller.failures import keep_failures
from neox_launcher.controller.hang import HangWatch, report_hang
from neox_launcher.controller.listener import Listener
from neox_launcher.controller.start_commands import StartCommands
from neox_launcher.controller.terminal import (
    pass_on,
    print_message,
    settle_output,
    wait_for_slow_readers,
)
from neox_launcher.plan.plan import ANY_ENDPOINT, Endpoint
from neox_launcher.protocol.channel import different_versions
from neox_launcher.protocol.handshake import new_token
from neox_launcher.protocol.messages import Message
from neox_launcher.protocol.orders import Orders
from neox_launcher.protocol.outcome import HEAD_START_SECONDS, Failure, Outcome, ended_by_stop, judge
from neox_launcher.protocol.run_folder import run_folder
from neox_launcher.protocol.stop_signals import (
    STOP_SIGNALS,
    WARNING_SIGNAL,
    handling,
    name_of,
    unblock_warning,
)
from neox_launcher.resources.host import name_some

__all__ = ["Failure", "Outcome", "supervise"]

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 2.0
_KILL_SECONDS = 6.0
_DUMP_SECONDS = 8.0
_PATIENCE_SECONDS = 5.0
# Other workers notice the loss of an agent at once and report errors; a busy launch host notices it later.
_LOSS_HEAD_START_SECONDS = 5.0
# A scheduler that signals the whole job reaches the hosts and the launcher at different times.
_SAME_REQUEST_SECONDS = 3.0
# `timeout` signals its command and then the whole process group, of which the command is a member.
_REPEAT_SECONDS = 1.0
# Requests to interrupt a reply that an agent may leave unanswered.
_MOST_UNANSWERED = 2
_LOCAL_ADDRESS = "127.0.0.1"


def supervise(
    commands_for: Callable[[Contact], Sequence[Command]],
    orders: Orders,
    *,
    is_local: bool,
    start_timeout: float,
    endpoint: Endpoint = ANY_ENDPOINT,
    token: str | None = None,
    shares_terminal: bool | None = None,
    display: Display | None = None,
) -> Outcome:
    """Start the agents, send them their orders, and supervise the workers until all have ended.

    Args:
        commands_for: returns the commands that start the agents, which connect to the given contact.
        orders: orders for the agents.
        is_local: the job uses only this machine: listen only on the loopback interface.
        start_timeout: seconds within which every host must report.
        endpoint: where agents of other hosts connect.
        token: secret that agents know already; None for a new one.
        shares_terminal: rank 0 reads and writes the terminal itself; None: if `is_local`.
        display: shows what the launch is doing; None shows nothing.

    Raises:
        LaunchError: a command cannot be started, or the endpoint cannot be used.
    """
    with run_folder() as folder, selectors.DefaultSelector() as selector:
        launch = _Launch(
            orders,
            selector,
            is_local=is_local,
            start_timeout=start_timeout,
            endpoint=endpoint,
            token=token or new_token(),
            shares_terminal=is_local if shares_terminal is None else shares_terminal,
            display=display,
        )
        with launch.listening_to_signals():
            outcome = launch.run(commands_for(launch.contact(folder)))
    settle_output()
    return outcome


class _Launch:
    """State of one running launch."""

    def __init__(
        self,
        orders: Orders,
        selector: selectors.BaseSelector,
        *,
        is_local: bool,
        start_timeout: float,
        endpoint: Endpoint,
        token: str,
        shares_terminal: bool = False,
        display: Display | None = None,
    ) -> None:
        self._orders, self._selector, self._display = orders, selector, display or Display()
        self._shares_terminal = shares_terminal
        self._start_timeout = start_timeout
        self._start_by = time.monotonic() + start_timeout
        self._agents = Agents(
            orders,
            selector,
            hear=lambda agent, message: self._answers[message["kind"]](agent, message),
            lose=self._lose,
            refuse=self._fail,
            shares_terminal=shares_terminal,
        )
        self._listener = Listener(
            token,
            selector,
            self._agents.on_connected,
            on_other_version=self._note_other_version,
            is_local=is_local,
            endpoint=endpoint,
        )
        self._failures: list[Failure] = []
        self._lost: set[int] = set()
        self._other_versions: dict[str, str] = {}
        self._facts: dict[int, Mapping[str, Any]] = {}
        self._signals: list[int] = []
        self._num_handled_signals = 0
        self._interrupts_received = self._interrupts_sent = self._interrupts_answered = 0
        self._relayed: tuple[int, float] | None = None
        self._counted_at: float | None = None
        self._is_stopping = False
        self._port: int | None = None
        self._is_started = False
        self._trouble_at: float | None = None
        self._killed_at: float | None = None
        self._hang = HangWatch(orders.hang_timeout, first_timeout=orders.first_iteration_timeout)
        self._dump_by: float | None = None
        self._answers: Mapping[str, Callable[[AgentConnection, Message], None]] = {
            "ready": self._note_ready,
            "refused": self._note_refusal,
            "output": self._print_output,
            "progress": self._note_progress,
            "trouble": self._note_trouble,
            "signal": self._note_signal,
            "interrupted": self._note_interrupted,
            "dumped": self._note_dump,
            "ended": self._note_end,
        }

    def contact(self, folder: Path) -> Contact:
        """Return how agents connect to this launch.

        Args:
            folder: private folder for the files that commands read.
        """
        return Contact(
            addresses=self._listener.addresses,
            port=self._listener.port,
            token=self._listener.token,
            folder=str(folder),
        )

    @contextmanager
    def listening_to_signals(self) -> Iterator[None]:
        """Record stop signals instead of being ended by them."""
        # SIGHUP (a lost connection) is a request to stop. A launcher that Ctrl-Z stopped would not read what
        # agents send, until the connections are lost.
        with handling(self._remember, *STOP_SIGNALS), handling(lambda number, frame: None, signal.SIGTSTP):
            mask = unblock_warning()
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._may_interrupt_reply:
            self._interrupts_received += 1
        elif not self._is_same_request(number):
            self._signals.append(number)
            if number != WARNING_SIGNAL:
                self._counted_at = time.monotonic()

    def _is_same_request(self, number: int) -> bool:
        """Whether a signal belongs to a request that has been counted already."""
        now = time.monotonic()
        # A scheduler that signals every process of a job also reaches the agents, possibly earlier.
        was_relayed = (
            number != signal.SIGINT
            and self._relayed is not None
            and self._relayed[0] == number
            and now - self._relayed[1] < _SAME_REQUEST_SECONDS
        )
        is_repeated = self._counted_at is not None and now - self._counted_at < _REPEAT_SECONDS
        return was_relayed or (is_repeated and number != WARNING_SIGNAL)

    @property
    def _may_interrupt_reply(self) -> bool:
        """Whether Ctrl-C is for the reply of rank 0. If the agent does not answer, it stops the job."""
        unanswered = self._interrupts_received - self._interrupts_answered
        can_reply = self._orders.is_interactive and self._is_started and not self._signals
        return can_reply and unanswered < _MOST_UNANSWERED

    def run(self, commands: Sequence[Command]) -> Outcome:
        """Run until all agents have reported the end of their workers, or are lost."""
        exit_code = 1
        self._display.begin_attempt()
        self._display.show_phase(f"starting {pluralize(len(self._orders.hosts), 'host')}")
        try:
            tools = StartCommands(commands, self._selector, shares_terminal=self._shares_terminal)
            try:
                while not self._is_over():
                    self._turn(tools)
                # Hosts that did not report the end of their workers are lost.
                if self._is_started:
                    self._lost.update(agent.number for agent in self._agents if not agent.has_ended)
                exit_code = self._judged().exit_code
            finally:
                # What rank 0 reported last is of the past.
                self._display.show_phase("ending")
                self._listener.close()
                self._agents.send_all("leave", {"exit_code": exit_code})
                tools.end(patience=_PATIENCE_SECONDS if len(self._agents) else 0.0)
        finally:
            self._listener.close()
            self._agents.close()
        self._display.note_iteration(self._hang.iteration or 0)
        # After a request to stop, hosts may end in any way.
        if not self._signals:
            keep_failures([failure for failure in self._failures if failure.rank is None], self._orders)
        # A request to stop has ended workers that could not handle it yet.
        elif (
            self._is_started
            and self._orders.is_training
            and self._hang.iteration is None
            and any(map(ended_by_stop, self._failures))
        ):
            print_message("stopped while the run was loading: nothing was saved\n")
        return replace(
            self._judged(),
            facts=self._facts,
            has_started=self._is_started,
            iteration=self._hang.iteration,
            lost_hosts=tuple(self._orders.hosts[number].name for number in sorted(self._lost)),
            other_versions=self._other_versions,
        )

    def _judged(self) -> Outcome:
        return judge(self._failures, self._signals, stops_regularly=self._orders.is_server)

    def _turn(self, tools: StartCommands) -> None:
        for key, _ in self._selector.select(timeout=_POLL_SECONDS):
            key.data()
        self._listener.tick()
        wait_for_slow_readers()
        # The agent of rank 0 answers whether there is a reply to interrupt.
        while self._interrupts_sent < self._interrupts_received:
            self._interrupts_sent += 1
            self._agents.send(next(agent for agent in self._agents if 0 in agent.ranks), "interrupt")
        self._pass_signals_on()
        if not self._is_started and self._killed_at is None:
            self._get_started(tools)
        self._look_for_hang()
        if self._trouble_at is not None and time.monotonic() - self._trouble_at > _GRACE_SECONDS:
            self._kill()

    def _is_over(self) -> bool:
        if self._killed_at is not None and time.monotonic() - self._killed_at > _KILL_SECONDS:
            return True
        return self._agents.have_ended if self._is_started else self._killed_at is not None

    # Starting

    def _get_started(self, tools: StartCommands) -> None:
        """Start the workers when every host is ready; give up on hosts that cannot connect any more."""
        if self._agents.are_complete:
            # No other agent is expected: agents do not connect again, and a restart listens on a new port.
            self._listener.close()
        if self._agents.are_ready:
            tools.talk()
            # A single host uses the loopback interface.
            own = _LOCAL_ADDRESS if len(self._orders.hosts) == 1 else self._agents.first_address()
            self._is_started = True
            self._hang.start()
            self._display.show_phase("loading")
            place = {"master_addr": self._orders.master_addr or own, "master_port": self._port}
            self._agents.send_all("start", place)
            return
        if self._other_versions:
            return  # The launch ends in a moment; until then other hosts report their versions.
        missing = self._agents.missing_hosts()
        lost = [number for number in missing if tools.has_given_up_on(number)]
        if lost:
            self._give_up_on(lost, "could not be started", tools)
        elif time.monotonic() > self._start_by:
            self._give_up_on(missing, f"did not report within {self._start_timeout:g} s", tools)

    def _give_up_on(self, missing: Sequence[int], why: str, tools: StartCommands) -> None:
        # If no host connects, the tool failed, not the hosts.
        self._lost.update(missing if len(missing) < len(self._orders.hosts) else ())
        names = name_some([self._orders.hosts[number].name for number in missing])
        said = tools.said(missing[0] if len(missing) == 1 else None)
        output = f"output of the start command:\n{said}" if said else "the start command printed nothing"
        if not said and not any(map(tools.starts, missing)):
            output = "see the output of the process that the scheduler starts there"
        self._fail("", f"{names}: {why}; {output}")
        self._kill()

    # Messages of the agents

    def _lose(self, agent: AgentConnection, reason: str) -> None:
        self._hang.forget(agent.ranks)
        if self._killed_at is not None:
            return
        # An MPI ends its other processes when one is lost.
        if not (agent.is_mpi and self._lost):
            self._lost.add(agent.number)
        what = (
            f"agent lost ({reason}), with {name_workers(agent.ranks)}; workers still running there are ended"
        )
        if len(self._orders.hosts) > 1:
            what += (
                ". Check whether the host is up, and read its kernel log; to continue without it, start "
                f"again with exclude: {self._orders.hosts[agent.number].name} (with elasticity, "
                "--max-restarts does this automatically)"
            )
        self._fail(agent.host, what, head_start=_LOSS_HEAD_START_SECONDS)

    def _note_ready(self, agent: AgentConnection, message: Message) -> None:
        agent.is_ready = True
        if message["port"] is not None:
            self._port = int(message["port"])

    def _note_other_version(self, host: str, version: str) -> None:
        self._other_versions[host] = version
        self._fail(host, different_versions("its agent", version), exit_code=2)

    def _note_refusal(self, agent: AgentConnection, message: Message) -> None:
        self._fail(agent.host, str(message["message"]), exit_code=2)
        self._kill()

    def _note_progress(self, agent: AgentConnection, message: Message) -> None:
        for rank, iteration in message["ranks"].items():
            self._hang.hear(int(rank), int(iteration))
        if message["status"]:
            self._display.show_status(restored(message["status"]))

    def _note_trouble(self, agent: AgentConnection, message: Message) -> None:
        self._trouble_at = self._trouble_at or time.monotonic()

    def _note_signal(self, agent: AgentConnection, message: Message) -> None:
        # A scheduler signals all agents at once: that is one request. An MPI that has lost a process also
        # signals the others: that is not a request to stop.
        if not self._signals and not (agent.is_mpi and self._lost):
            number = int(message["number"])
            self._relayed = number, time.monotonic()
            self._signals.append(number)

    def _note_interrupted(self, agent: AgentConnection, message: Message) -> None:
        self._interrupts_answered += 1
        if not message["is_passed_on"]:
            self._signals.append(signal.SIGINT)

    def _note_dump(self, agent: AgentConnection, message: Message) -> None:
        agent.dump = message["ranks"]

    def _note_end(self, agent: AgentConnection, message: Message) -> None:
        agent.has_ended = True
        self._hang.forget(agent.ranks)
        if message["failures"]:
            self._failures += [Failure.from_message(failure) for failure in message["failures"]]
            self._note_trouble(agent, message)
        for rank, facts in message["facts"].items():
            self._facts[int(rank)] = {**facts, "host": agent.host, "clock": agent.clock}
        if message["overran"]:
            print_message(
                f"killed {name_workers(message['overran'])} on {agent.host}: not saved within "
                f"{self._orders.stop_timeout:g} s (stop-timeout)\n"
            )

    def _print_output(self, agent: AgentConnection, message: Message) -> None:
        data = str(message["text"]).encode("utf-8", errors="surrogateescape")
        if self._orders.output == "all":
            prefix = f"{agent.host} {message['rank']}: ".encode()
            data = b"".join(prefix + line + b"\n" for line in data.rstrip(b"\n").split(b"\n"))
        pass_on(sys.stdout if message["stream"] == "stdout" else sys.stderr, data)

    # Ending

    def _fail(
        self, host: str, message: str, *, exit_code: int = 1, head_start: float = HEAD_START_SECONDS
    ) -> None:
        """Record a failure that is not that of a worker; it ends the launch."""
        self._failures.append(
            Failure(
                rank=None,
                host=host,
                time=time.time() - head_start,
                message=message,
                exit_code=exit_code,
                unreported=True,
            )
        )
        self._trouble_at = self._trouble_at or time.monotonic()

    def _kill(self) -> None:
        if self._killed_at is None:
            self._killed_at = time.monotonic()
            self._display.show_request("ending the workers")
            self._agents.send_all("kill")

    def _pass_signals_on(self) -> None:
        signals = tuple(self._signals)
        if len(signals) <= self._num_handled_signals:
            return
        self._num_handled_signals = len(signals)
        last = name_of(signals[-1])
        # Schedulers repeat their warning: it never counts as the second request, which kills all workers.
        if sum(number != WARNING_SIGNAL for number in signals) > 1:
            if self._killed_at is None:
                print_message(f"\n{last} received again: stopping immediately; what is not saved is lost\n")
            self._kill()
        elif not self._is_started:
            print_message(f"\n{last} received before the workers were started: ending\n")
            self._kill()
        elif not self._is_stopping:
            self._is_stopping = True
            hint = "" if signals[-1] == WARNING_SIGNAL else "; repeat to stop immediately"
            when = " after this iteration or the next" if self._orders.is_training else ""
            print_message(f"\n{last} received: stopping{when}{hint}\n")
            self._display.show_request("stopping")
            self._agents.send_all("stop", {"number": signals[0]})
        elif signals[-1] != WARNING_SIGNAL:
            print_message(f"\n{last} received: already stopping; repeat to stop immediately\n")

    def _look_for_hang(self) -> None:
        if self._killed_at is not None or self._signals:
            return
        if not self._hang.has_stalled(self._orders.num_workers):
            # Possibly because of progress while the workers reported their stacks.
            self._dump_by = None
            return
        running = [agent for agent in self._agents if not agent.has_ended]
        if self._dump_by is None:
            self._dump_by = time.monotonic() + _DUMP_SECONDS
            for agent in running:
                agent.dump = None
                self._agents.send(agent, "dump")
        elif time.monotonic() > self._dump_by or all(agent.dump is not None for agent in running):
            self._lost.update(agent.number for agent in running if agent.dump is None)
            self._fail("", report_hang(self._orders, self._agents, self._hang))
            self._kill()

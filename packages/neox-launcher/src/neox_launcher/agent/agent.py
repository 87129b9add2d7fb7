"""The agent of one host: `python -m neox_launcher.agent`, started by the cluster's tools.

It connects to the launcher, proves that it knows the token of the launch, receives its orders and starts the
workers of this host; under MPI there is one agent per rank, with one worker. It then follows the launcher's
messages and reports events on this host. When the connection closes for any reason, it ends its workers,
because no other process would.
"""

import argparse
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from neox_config.errors import LaunchError
from neox_config.facts.records import OUTPUT
from neox_config.limits import limit_reached
from neox_launcher.agent.output import OutputPipes
from neox_launcher.agent.worker_environment import place_variables, worker_environment
from neox_launcher.agent.workers import Workers
from neox_launcher.protocol.background import BackgroundQueue, describe_loss
from neox_launcher.protocol.channel import Channel, ConnectionLostError, listen_everywhere, own_addresses
from neox_launcher.protocol.failure_record import record_failures
from neox_launcher.protocol.handshake import TOKEN_VARIABLE, connect
from neox_launcher.protocol.messages import Message
from neox_launcher.protocol.orders import AgentOrders, Place
from neox_launcher.protocol.outcome import Failure, ended_by_stop
from neox_launcher.protocol.run_folder import no_room, run_folder
from neox_launcher.protocol.stop_signals import STOP_SIGNALS, block_warning, unblock_warning
from neox_launcher.worker.bootstrap import CORES_FILE, OUTPUT_STREAMS
from neox_launcher.worker.ranks import STORE_SOCKET_VARIABLE, read_mpi_rank
from neox_launcher.worker.reporting import AGENT_FILE, start_of, write_aside

__all__ = ["main"]

_POLL_SECONDS = 0.1
_PROGRESS_SECONDS = 1.0
# Phases may be short: the launcher would show one that has ended.
_STATUS_SECONDS = 0.25
_OUTPUT_LIMIT = 1024 * 1024
_LEAVE_SECONDS = 5.0
_BEHIND_SECONDS = 0.01
_RESOLVED = "resolved"
_CHECK_LIMITS = "check this host's limits of processes, open files and memory (ulimit -a)"
_Sending = tuple[str, Callable[[], Message]]
_BOOTSTRAP = "neox_launcher.worker.bootstrap"
# Workers of other hosts may connect before rank 0 accepts; the kernel may apply a lower limit.
_STORE_BACKLOG = 4096


def main() -> None:
    """Serve one launch."""
    block_warning()
    options = _parse(sys.argv[1:])
    host = socket.gethostname()
    try:
        who = {
            "number": options.host_number,
            "name": os.environ.get("SLURMD_NODENAME", host) if options.slurm else None,
            "rank": read_mpi_rank() if options.mpi else None,
        }
        addresses, _, port = options.launcher.rpartition(":")
        channel = connect(addresses.split(","), int(port), _read_token(options.token_file), host=host)
        with run_folder() as folder, Agent(channel, folder, host) as agent:
            agent.serve(who)
    except (ConnectionLostError, LaunchError) as error:
        # The launcher prints this if it is still running.
        sys.stderr.write(f"neox-launch, on {host}: {error}\n")
        sys.exit(1)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m neox_launcher.agent", description="Started by neox-launch."
    )
    parser.add_argument("--launcher", required=True, metavar="ADDRESS[,ADDRESS...]:PORT")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--host-number", type=int, metavar="N", help="number of this host in the plan")
    who.add_argument("--slurm", action="store_true", help="one agent per host; take its name from Slurm")
    who.add_argument("--mpi", action="store_true", help="one agent per rank; take the rank from MPI")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"read the token from this file instead of {TOKEN_VARIABLE} or standard input",
    )
    return parser.parse_args(arguments)


def _read_token(path: str | None) -> str:
    """Read the token from the file, the environment or the first line of standard input.

    The variable is removed from the environment, so that workers do not inherit the token.
    """
    from_environment = os.environ.pop(TOKEN_VARIABLE, None)
    if path is not None:
        try:
            return os.fsdecode(Path(path).read_bytes()).strip()
        except OSError as error:
            raise LaunchError(f"the token file {path} cannot be read: {error.strerror}") from error
    token = from_environment or sys.stdin.readline().strip()
    if not token:
        raise LaunchError(
            "the token of the launch did not arrive, neither in the environment nor on standard input; a "
            "container that remote-prefix enters must pass on standard input (docker exec -i)"
        )
    return token


class Agent:
    """The part of one host in a launch.

    The first two messages of the launcher contain the orders and the place of this agent.

    Args:
        channel: connection to the launcher; closed at the end.
        folder: private folder for the files of the workers.
        host: host name of this machine.
    """

    def __init__(self, channel: Channel, folder: Path, host: str) -> None:
        self._channel, self._folder, self._host = channel, folder, host
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        # A launcher that does not read delays what it is sent, not the workers of this host.
        self._outbox: BackgroundQueue[_Sending] = BackgroundQueue(
            self._deliver, limit=_OUTPUT_LIMIT, loss_item=self._describe_loss, name="messages"
        )
        self._signals: list[int] = []
        self._orders: AgentOrders
        self._place: Place
        self._workers: Workers | None = None
        self._pipes = OutputPipes(
            folder, [], shown=[], by_lines=False, files=None, logged=[], show=self._show
        )
        self._environment: dict[str, str] = {}
        self._store_socket: socket.socket | None = None
        self._sent: set[str] = set()
        self._progress: dict[int, tuple[int, float]] = {}
        self._next_progress = self._next_status = 0.0
        self._status: Message = {}
        self._has_leave = self._is_stopping = False
        self.exit_code = 0
        """Exit code of the launch, once the launcher has dismissed this agent."""
        self._answers: Mapping[str, Callable[[Message], None]] = {
            "orders": self._note_orders,
            "place": self._prepare,
            "start": self._start,
            "interrupt": self._interrupt,
            "stop": self._stop,
            "kill": self._kill,
            "dump": self._dump,
            "leave": self._leave,
        }

    def __enter__(self) -> "Agent":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill({})
        self._close_store_socket()
        self._pipes.close()
        self._channel.close()

    def serve(self, who: Message) -> None:
        """Follow the messages of the launcher until it dismisses this agent.

        Args:
            who: host or rank of this agent in the plan.

        Raises:
            ConnectionLostError: the connection to the launcher is lost.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: self._signals.append(number))
        unblock_warning()
        addresses = own_addresses(fallback=self._channel.address)
        self._channel.send("hello", **who, host=self._host, addresses=addresses, time=time.time())
        while not self._has_leave:
            is_behind = self._outbox.is_behind
            if is_behind:
                time.sleep(_BEHIND_SECONDS)
            for key, _ in self._selector.select(timeout=_POLL_SECONDS):
                if key.fileobj is self._channel:
                    for message in self._channel.receive():
                        self._answers[message["kind"]](message)
                elif not is_behind:
                    self._pipes.read(key.fd)
            self._outbox.check()
            while self._signals:
                self._send("signal", number=self._signals.pop(0))
            if self._workers is not None:
                self._watch(self._workers)
        self._outbox.wait(_LEAVE_SECONDS)

    def _send(self, kind: str, **content: Any) -> None:
        """Send a message before all output that waits."""
        self._outbox.put((kind, lambda: content), 0, is_kept=True, is_urgent=True)

    def _deliver(self, sending: _Sending) -> None:
        kind, content = sending
        self._channel.send(kind, **content())

    def _describe_loss(self, size: int) -> _Sending:
        text = describe_loss(size, "the connection to the launcher was too slow").decode()
        text = text.lstrip() if self._orders.output == "all" else text
        return "output", lambda: {"rank": self._place.ranks[0], "stream": "stderr", "text": text}

    def _note_orders(self, message: Message) -> None:
        self._orders = AgentOrders.from_fields(message["orders"])

    def _prepare(self, message: Message) -> None:
        """Prepare all resources of the workers, so that errors are reported before any worker starts."""
        orders = self._orders
        self._place = place = Place.from_fields(message["place"])
        try:
            if not Path(orders.working_directory).is_dir():
                raise LaunchError(
                    f"the working directory {orders.working_directory} does not exist here; start "
                    "neox-launch in a directory that exists on all hosts"
                )
            write_aside(self._folder / AGENT_FILE, str(os.getpid()))
            if orders.resolved:
                write_aside(self._folder / _RESOLVED, orders.resolved)
            if orders.bind_cores:
                write_aside(self._folder / CORES_FILE, "")
            self._pipes = self._open_pipes(orders, place)
            if 0 in place.ranks:
                # Rank 0 inherits it, so that no other process can take the port.
                self._store_socket = listen_everywhere(orders.master_port, "master-port", _STORE_BACKLOG)
            self._environment = worker_environment(
                orders, place.slots, own=os.environ, cores=len(os.sched_getaffinity(0))
            )
        except (OSError, LaunchError) as error:
            self._send("refused", message=no_room(error) if isinstance(error, OSError) else str(error))
            return
        port = None if self._store_socket is None else self._store_socket.getsockname()[1]
        self._send("ready", port=port)

    def _open_pipes(self, orders: AgentOrders, place: Place) -> OutputPipes:
        shows_all = orders.output == "all"
        shares_terminal = place.shares_terminal and not shows_all
        shown = place.ranks if shows_all else (0,)
        # What other programs show on the terminal are their results, which are no part of the run's log.
        logged = [rank for rank in place.ranks if orders.is_training or rank not in shown]
        files = Path(orders.working_directory, orders.log_dir, OUTPUT) if orders.log_dir else None
        pipes = OutputPipes(
            self._folder,
            place.ranks,
            shown=shown,
            by_lines=shows_all,
            files=files,
            logged=logged,
            show=self._show,
            # Rank 0 uses the terminal itself: it may ask for prompts.
            keeps_terminal=[
                name
                for number, name in enumerate(OUTPUT_STREAMS, start=1)
                if shares_terminal and os.isatty(number)
            ],
        )
        for descriptor in pipes.descriptors:
            self._selector.register(descriptor, selectors.EVENT_READ)
        return pipes

    def _show(self, rank: int, stream: str, data: bytes) -> None:
        def content() -> Message:
            text = data.decode("utf-8", errors="surrogateescape")
            return {"rank": rank, "stream": stream, "text": text}

        self._outbox.put(("output", content), len(data))

    def _start(self, message: Message) -> None:
        orders = self._orders
        command = [sys.executable, "-u", "-m", _BOOTSTRAP, *orders.worker]
        if orders.resolved:
            command += ["--resolved", str(self._folder / _RESOLVED)]
        places = place_variables(self._place, message["master_addr"], message["master_port"])
        environments = {rank: {**self._environment, **place} for rank, place in places.items()}
        keep_open = {}
        if self._store_socket is not None:
            keep_open[0] = [self._store_socket.fileno()]
            environments[0][STORE_SOCKET_VARIABLE] = str(self._store_socket.fileno())
        self._workers = Workers(self._folder, self._host)
        try:
            self._workers.start(command, environments, orders.working_directory, keep_open=keep_open)
        except OSError as error:
            raise LaunchError(
                f"a worker cannot be started: {error}; {limit_reached(error) or _CHECK_LIMITS}"
            ) from error
        self._close_store_socket()

    def _close_store_socket(self) -> None:
        if self._store_socket is not None:
            self._store_socket.close()
            self._store_socket = None

    def _watch(self, workers: Workers) -> None:
        workers.watch()
        self._send_progress(workers)
        if workers.in_trouble and "trouble" not in self._sent:
            self._sent.add("trouble")
            self._send("trouble")
        if workers.has_ended and "ended" not in self._sent:
            self._sent.add("ended")
            self._send_end(workers)

    def _send_progress(self, workers: Workers, *, is_last: bool = False) -> None:
        now, news, status = time.monotonic(), dict[int, int](), Message()
        if is_last or now >= self._next_progress:
            self._next_progress = now + _PROGRESS_SECONDS
            before, self._progress = self._progress, workers.progress()
            news = {
                rank: iteration
                for rank, (iteration, when) in self._progress.items()
                if before.get(rank) != (iteration, when)
            }
        if is_last or now >= self._next_status:
            self._next_status = now + _STATUS_SECONDS
            before_status, self._status = self._status, workers.status() or self._status
            status = {} if self._status == before_status else self._status
        if news or status:
            self._send("progress", ranks=news, status=status)

    def _send_end(self, workers: Workers) -> None:
        self._send_progress(workers, is_last=True)
        failures = workers.failures()
        workers.kill()
        self._outbox.wait(_LEAVE_SECONDS, is_patient=True)
        self._pipes.drain()
        failures = [replace(failure, output=self._pipes.unseen(failure.rank)) for failure in failures]
        self._record(failures)
        facts = workers.facts()

        def content() -> Message:
            # Built when it is sent, because it contains the ages of the failures.
            sent = [failure.as_message() for failure in failures]
            return {"failures": sent, "overran": workers.overran, "facts": facts}

        self._outbox.put(("ended", content), 0, is_kept=True)

    def _record(self, failures: Sequence[Failure]) -> None:
        """Keep the failures in the log folder, where the report of the run finds them."""
        folder = self._orders.record_folder
        if folder is None:
            return
        # A worker that was still loading has ended as requested. The record is that of the running run.
        kept = [
            failure
            for failure in failures
            if not failure.is_refused_start and not (self._is_stopping and ended_by_stop(failure))
        ]
        try:
            record_failures(folder, kept, **start_of(self._orders.environment))
        except OSError as error:
            sys.stderr.write(f"neox-launch, on {self._host}: failures are not recorded: {error}\n")

    def _interrupt(self, message: Message) -> None:
        is_passed_on = self._workers is not None and self._workers.interrupt(0)
        self._send("interrupted", is_passed_on=is_passed_on)

    def _stop(self, message: Message) -> None:
        self._is_stopping = True
        if self._workers is not None:
            self._workers.stop(message["number"], within=self._orders.stop_timeout)

    def _kill(self, message: Message) -> None:
        if self._workers is not None:
            self._workers.kill()

    def _dump(self, message: Message) -> None:
        if self._workers is not None:
            self._workers.ask()
            self._send("dumped", ranks=self._workers.answers())

    def _leave(self, message: Message) -> None:
        self._has_leave, self.exit_code = True, int(message["exit_code"])

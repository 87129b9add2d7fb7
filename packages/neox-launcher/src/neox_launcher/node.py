"""One per host: `python -m neox_launcher.node`, which the cluster's own tools start.

It reaches the launcher, proves that it knows the launch's token, fetches its orders, and starts PyTorch's
own agent with this host's workers; under MPI there is one per rank, which starts that rank's worker itself.
From then on it does what the launcher says and tells what happens here. When the connection closes, for
whatever reason, it ends its workers: nobody is left who could.
"""

import argparse
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from neox_launcher.control import (
    TOKEN_VARIABLE,
    Channel,
    ConnectionLostError,
    Message,
    connect,
    own_addresses,
)
from neox_launcher.errors import LaunchError
from neox_launcher.orders import Orders, Place
from neox_launcher.output import OutputPipes
from neox_launcher.ranks import read_mpi_rank
from neox_launcher.run_folder import run_folder
from neox_launcher.seat import CORES_FILE
from neox_launcher.stop_signals import STOP_SIGNALS, block_warning, unblock_warning
from neox_launcher.worker import AGENT_FILE, NODE_FILE, write_aside
from neox_launcher.worker_command import agent_command, mpi_variables, seat_command
from neox_launcher.worker_environment import worker_environment
from neox_launcher.workers import Workers

__all__ = ["main"]

_POLL_SECONDS = 0.1
_PROGRESS_SECONDS = 1.0
_RESOLVED = "resolved"


def main() -> None:
    """Serve one launch."""
    block_warning()
    options = _parse(sys.argv[1:])
    host = socket.gethostname()
    try:
        who = _who_am_i(options)
        addresses, _, port = options.launcher.rpartition(":")
        channel = connect(addresses.split(","), int(port), _read_token(options.token_file))
        with run_folder() as folder, Node(channel, folder, host) as node:
            node.serve(who)
    except (ConnectionLostError, LaunchError) as error:
        # The launcher reads this where it is not the one who is gone.
        sys.stderr.write(f"neox-launch, on {host}: {error}\n")
        sys.exit(1)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m neox_launcher.node", description="Started by neox-launch."
    )
    parser.add_argument("--launcher", required=True, metavar="ADDRESS[,ADDRESS...]:PORT")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--node", type=int, metavar="N", help="which host of the plan this is")
    who.add_argument("--slurm", action="store_true", help="one process per host: Slurm says which this is")
    who.add_argument("--mpi", action="store_true", help="one process per rank: MPI says which this is")
    parser.add_argument("--token-file", metavar="FILE", help=f"instead of {TOKEN_VARIABLE} or standard input")
    return parser.parse_args(arguments)


def _who_am_i(options: argparse.Namespace) -> Message:
    if options.mpi:
        return {"rank": read_mpi_rank().rank}
    if options.slurm:
        return {"name": os.environ.get("SLURMD_NODENAME", socket.gethostname())}
    return {"node": options.node}


def _read_token(path: str | None) -> str:
    """From the file, the environment, or the first line of standard input; workers inherit none of them."""
    from_environment = os.environ.pop(TOKEN_VARIABLE, None)
    if path is not None:
        try:
            return Path(path).read_text(encoding="ascii").strip()
        except OSError as error:
            raise LaunchError(f"the token file {path} cannot be read: {error.strerror}") from error
    return from_environment or sys.stdin.readline().strip()


class Node:
    """One host's part in a launch.

    The launcher's first message brings the orders; it asks for nothing before.

    Args:
        channel: to the launcher; closed at the end.
        folder: private, for what workers leave here.
        host: this host's name for itself.
    """

    def __init__(self, channel: Channel, folder: Path, host: str) -> None:
        self._channel, self._folder, self._host = channel, folder, host
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._signals: list[int] = []
        self._orders: Orders
        self._place: Place
        self._workers: Workers | None = None
        self._pipes = OutputPipes(folder, [], shown=[], by_lines=False, files=None, show=self._show)
        self._environment: dict[str, str] = {}
        self._told: set[str] = set()
        self._progress: dict[int, tuple[int, float]] = {}
        self._next_progress = 0.0
        self._has_leave = False
        self._answers: Mapping[str, Callable[[Message], None]] = {
            "orders": self._prepare,
            "start": self._start,
            "stop": self._stop,
            "kill": self._kill,
            "dump": self._dump,
            "leave": self._leave,
        }

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *_: object) -> None:
        if self._workers is not None:
            self._workers.kill_everything()
        self._pipes.close()
        self._channel.close()

    def serve(self, who: Message) -> None:
        """Do what the launcher says until it lets this node go.

        Args:
            who: which of the plan's hosts or ranks this is.

        Raises:
            ConnectionLostError: the launcher is gone.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        unblock_warning()
        addresses = own_addresses(fallback=self._channel.address)
        self._channel.send("hello", **who, host=self._host, addresses=addresses, time=time.time())
        while not self._has_leave:
            for key, _ in self._selector.select(timeout=_POLL_SECONDS):
                if key.fileobj is self._channel:
                    for message in self._channel.receive():
                        self._answers[message["kind"]](message)
                else:
                    self._pipes.read(key.fd)
            self._tell_signals()
            if self._workers is not None:
                self._watch(self._workers)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _tell_signals(self) -> None:
        while self._signals:
            self._channel.send("signal", number=self._signals.pop(0))

    def _prepare(self, message: Message) -> None:
        """Everything that can go wrong before a worker starts goes wrong here."""
        self._orders = orders = Orders.from_json(message["orders"])
        self._place = place = Place.from_fields(message["place"])
        try:
            self._write_files(orders)
            self._pipes = self._open_pipes(orders, place)
            port = _probe_port(orders.master_port) if 0 in place.ranks else None
            self._environment = worker_environment(
                orders,
                orders.hosts[place.node].slots,
                own=os.environ,
                cores=len(os.sched_getaffinity(0)),
            )
        except (OSError, LaunchError) as error:
            self._channel.send("refused", message=str(error))
            return
        self._channel.send("ready", port=port)

    def _write_files(self, orders: Orders) -> None:
        if not Path(orders.working_directory).is_dir():
            raise LaunchError(
                f"there is no folder {orders.working_directory} here; start neox-launch in a folder that all "
                "hosts have"
            )
        write_aside(self._folder / NODE_FILE, str(os.getpid()))
        if orders.resolved:
            write_aside(self._folder / _RESOLVED, orders.resolved)
        if orders.bind_cores:
            write_aside(self._folder / CORES_FILE, "")

    def _open_pipes(self, orders: Orders, place: Place) -> OutputPipes:
        shows_all = orders.output == "all"
        keeps_terminal = place.shares_terminal and not shows_all
        files = Path(orders.working_directory, orders.log_dir, "output") if orders.log_dir else None
        pipes = OutputPipes(
            self._folder,
            [rank for rank in place.ranks if not (keeps_terminal and rank == 0)],
            shown=place.ranks if shows_all else [0],
            by_lines=shows_all,
            files=files,
            show=self._show,
        )
        for descriptor in pipes.descriptors:
            self._selector.register(descriptor, selectors.EVENT_READ)
        return pipes

    def _show(self, rank: int, stream: str, data: bytes) -> None:
        text = data.decode("utf-8", errors="surrogateescape")
        self._channel.send("output", rank=rank, stream=stream, text=text)

    def _start(self, message: Message) -> None:
        orders, place = self._orders, self._place
        address, port = message["master_addr"], message["master_port"]
        program = list(orders.worker)
        if orders.resolved:
            program += ["--resolved", str(self._folder / _RESOLVED)]
        environment = {**self._environment}
        if place.is_mpi:
            # The worker's parent is this process.
            write_aside(self._folder / AGENT_FILE, str(os.getpid()))
            environment |= mpi_variables(orders, place, address, port)
            command = seat_command(program)
        else:
            command = agent_command(orders, place, address, port, program)
        self._workers = Workers(self._folder, place.ranks, self._host)
        self._workers.start(command, environment, orders.working_directory)

    def _watch(self, workers: Workers) -> None:
        workers.watch()
        self._tell_progress(workers)
        if workers.in_trouble and "trouble" not in self._told:
            self._told.add("trouble")
            self._channel.send("trouble")
        if workers.has_ended and "ended" not in self._told:
            self._told.add("ended")
            self._tell_end(workers)

    def _tell_progress(self, workers: Workers) -> None:
        if time.monotonic() < self._next_progress:
            return
        self._next_progress = time.monotonic() + _PROGRESS_SECONDS
        before, self._progress = self._progress, workers.progress()
        news = {
            rank: iteration
            for rank, (iteration, when) in self._progress.items()
            if before.get(rank) != (iteration, when)
        }
        if news:
            self._channel.send("progress", ranks=news)

    def _tell_end(self, workers: Workers) -> None:
        failures = [failure.as_message() for failure in workers.failures()]
        workers.kill_everything()
        self._pipes.drain()
        for failure in failures:
            failure["output"] = self._pipes.unseen(failure["rank"])
        self._channel.send("ended", failures=failures, overran=workers.overran, facts=workers.facts())

    def _stop(self, message: Message) -> None:
        if self._workers is not None:
            self._workers.stop(message["number"], within=self._orders.stop_timeout)

    def _kill(self, message: Message) -> None:
        if self._workers is not None:
            self._workers.kill()

    def _dump(self, message: Message) -> None:
        if self._workers is not None:
            self._workers.ask()
            self._channel.send("dumped", ranks=self._workers.answers())

    def _leave(self, message: Message) -> None:
        self._has_leave = True


def _probe_port(asked: int) -> int:
    """The port that was asked for, or a free one.

    Raises:
        LaunchError: it is in use.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", asked))
        except OSError as error:
            raise LaunchError(
                f"master-port: {asked} cannot be used here ({error.strerror}); "
                "another launch may use it: choose another port, or leave it out"
            ) from error
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()

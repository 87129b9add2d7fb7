"""A minimal valid configuration that tests modify."""

import fcntl
import os
import re
import signal
import socket
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from neox_config import NeoXConfig, load_config
from neox_launcher.backends.local import LocalBackend
from neox_launcher.controller import terminal
from neox_launcher.protocol.channel import Channel, Seal
from neox_launcher.protocol.orders import Orders
from neox_launcher.resources.host import Host

MINIMAL = """\
num-layers: 4
hidden-size: 64
num-attention-heads: 4
seq-length: 32
max-position-embeddings: 32
train-iters: 10
train-micro-batch-size-per-gpu: 2
optimizer: {type: Adam, params: {lr: 0.001}}
"""

_PRINTED_WITHIN_SECONDS = 60.0

Loader = Callable[..., NeoXConfig]


@pytest.fixture(autouse=True)
def _sigusr1_as_before() -> Iterator[None]:
    """Restore the handler of SIGUSR1, which `neox-launch` ignores at its end."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def capfd(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Wait for the threads that print before the output is read, and before its file is closed."""
    read = capfd.readouterr

    def settle() -> None:
        for queue in terminal._outputs._all():
            queue.wait(_PRINTED_WITHIN_SECONDS)

    def read_settled() -> Any:
        settle()
        return read()

    monkeypatch.setattr(capfd, "readouterr", read_settled)
    yield capfd
    settle()


@pytest.fixture
def sealed_channels() -> Iterator[Callable[[], tuple[Channel, Channel]]]:
    """Return a function that connects two channels, the launcher's and an agent's, after their handshake."""
    opened: list[Channel] = []

    def connect() -> tuple[Channel, Channel]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ends = [socket.create_connection(server.getsockname()), server.accept()[0]]
        launcher, agent = (Channel(end) for end in ends)
        keys = {"sending": b"to the agent", "receiving": b"to the launcher"}
        launcher.seal(Seal(**keys))
        swapped = {"sending": keys["receiving"], "receiving": keys["sending"]}
        agent.seal(Seal(**swapped))
        opened.extend((launcher, agent))
        return launcher, agent

    yield connect
    for channel in opened:
        channel.close()


@pytest.fixture
def make_orders() -> Callable[..., Orders]:
    """Return a function that builds orders for the program `-m program`, with changes."""

    def make(**changes: Any) -> Orders:
        settings: dict[str, Any] = {
            "hosts": (Host("one", (0, 1)),),
            "master_addr": None,
            "master_port": 0,
            "environment": {},
            "worker": ("-m", "program"),
            "resolved": "",
            "working_directory": "/",
            "log_dir": None,
            "gpus": 0,
            "bind_cores": False,
            "detect_nvlink_pairs": False,
            "stop_timeout": 1.0,
            "hang_timeout": None,
        }
        return Orders(**settings | changes)

    return make


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    """Return the path of `minimal.yml`."""
    path = tmp_path / "minimal.yml"
    path.write_text(MINIMAL)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a working directory with the dataset `data` of one document."""
    monkeypatch.chdir(tmp_path)
    header = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08" + (1).to_bytes(8, "little") * 2
    Path("data.idx").write_bytes(header + (4).to_bytes(4, "little") + bytes(8) + bytes(8))
    Path("data.bin").write_bytes(bytes(8))
    return tmp_path


@pytest.fixture
def load(minimal: Path) -> Loader:
    """Return `load(text, "name=value", ...)`, which loads minimal.yml, a second file, overrides."""

    def loader(text: str = "", *overrides: str) -> NeoXConfig:
        more = minimal.with_name("more.yml")
        more.write_text(text)
        return load_config([minimal, more], overrides=overrides)

    return loader


@pytest.fixture
def can_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine on which torch and neox-model are installed."""
    monkeypatch.setattr(LocalBackend, "missing", lambda backend: None)


class Screen:
    """The lines of a terminal after what was written to it; anything that is not expected there fails.

    A line that is not complete is the one with the cursor.
    """

    def __init__(self) -> None:
        self.lines = [""]
        self.column = 0
        self.is_cursor_hidden = False
        self.drawn: list[str] = []
        """Every state of the last line when the cursor returned to its beginning."""

    def feed(self, data: bytes) -> "Screen":
        """Show what was written."""
        for part in re.findall(
            r"\x1b\[[0-9;]*m|\x1b\[(?:2K|1A|\?25[lh])|[\r\n]|[^\r\n\x1b]+|\x1b", data.decode()
        ):
            self._show(part)
        return self

    def _show(self, part: str) -> None:
        if part == "\r":
            if self.lines[-1] and self.column:
                self.drawn.append(self.lines[-1])
            self.column = 0
        elif part == "\n":
            self.lines.append("")
            self.column = 0
        elif part == "\x1b[2K":
            self.lines[-1] = ""
        elif part == "\x1b[1A":
            assert self.lines.pop() == ""
        elif part.startswith("\x1b[?25"):
            self.is_cursor_hidden = part.endswith("l")
        elif not part.startswith("\x1b["):
            assert part.replace("\t", "").isprintable(), ascii(part)
            line = self.lines[-1]
            self.lines[-1] = line[: self.column] + part + line[self.column + len(part) :]
            self.column += len(part)


@pytest.fixture
def screen() -> Screen:
    """Return an empty screen."""
    return Screen()


@pytest.fixture
def open_terminal() -> Iterator[Callable[[int], tuple[int, int]]]:
    """Return a function that opens a terminal of a width: the end that shows, and the end of programs."""
    opened: list[int] = []

    def open_one(columns: int) -> tuple[int, int]:
        ends = os.openpty()
        opened.extend(ends)
        _set_width(ends[1], columns)
        return ends

    yield open_one
    for descriptor in opened:
        with suppress(OSError):
            os.close(descriptor)


@pytest.fixture
def resize() -> Callable[[int, int], None]:
    """Return a function that resizes a terminal."""
    return _set_width


def _set_width(descriptor: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

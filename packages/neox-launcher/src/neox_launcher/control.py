"""The control connection between the launcher and its nodes: one JSON object per line, over TCP.

Both sides prove that they know the launch's token before anything else is said: each answers the other's
challenge with an HMAC, so that the token itself never travels. What follows is neither signed nor encrypted:
as torch's own traffic, it belongs on a trusted network.

A peer that is gone without a word (a dead host, a cut link) is noticed by the kernel within
`SILENCE_SECONDS`. The kernel answers for a process that is merely stopped (Ctrl-Z), until what it does not
read fills the connection.
"""

import hmac
import json
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = [
    "SILENCE_SECONDS",
    "TOKEN_VARIABLE",
    "Channel",
    "ConnectionLostError",
    "Message",
    "connect",
    "new_token",
    "own_addresses",
    "prove",
]

Message = dict[str, Any]

TOKEN_VARIABLE = "NEOX_TOKEN"
SILENCE_SECONDS = 30
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_CONNECT_SECONDS = 5.0
_SEND_SECONDS = float(SILENCE_SECONDS)
_STRANGERS_LIMIT = 4 * 1024
_LIMIT = 32 * 1024 * 1024
_CHUNK = 64 * 1024


class ConnectionLostError(Exception):
    """The other side is gone, or does not speak as it should; the message says which."""


def new_token() -> str:
    """A secret for one launch."""
    return secrets.token_hex(32)


def prove(token: str, role: str, *challenges: str) -> str:
    """The answer to a challenge: only who knows the token can give it.

    Args:
        token: of the launch.
        role: `launcher` or `node`, so that no answer can be sent back as one's own.
        challenges: the other side's, then one's own.
    """
    return hmac.digest(token.encode(), "\0".join((role, *challenges)).encode(), "sha256").hex()


class Channel:
    """Sends and receives messages over a connected socket.

    Args:
        connection: owned by the channel from now on. Until `trust` is called, messages must be short.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._limit = _STRANGERS_LIMIT
        connection.settimeout(_SEND_SECONDS)
        _notice_silence(connection)

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    @property
    def address(self) -> str:
        """This side's address."""
        return str(self._socket.getsockname()[0])

    @property
    def is_trusted(self) -> bool:
        """Whether the other side has proved itself."""
        return self._limit == _LIMIT

    def trust(self) -> None:
        """The other side has proved itself: long messages are welcome."""
        self._limit = _LIMIT

    def send(self, kind: str, **content: Any) -> None:
        """Send one message.

        Raises:
            ConnectionLostError: the other side is gone.
        """
        line = json.dumps({"kind": kind, **content}).encode("ascii") + b"\n"
        try:
            self._socket.sendall(line)
        except OSError as error:
            raise ConnectionLostError(_reason(error)) from error

    def receive(self) -> Iterator[Message]:
        """The messages that one read completes; waits for something to read.

        Raises:
            ConnectionLostError: the connection is closed, or the other side breaks the rules.
        """
        try:
            data = self._socket.recv(_CHUNK)
        except OSError as error:
            raise ConnectionLostError(_reason(error)) from error
        if not data:
            raise ConnectionLostError("it closed the connection")
        self._buffer += data
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            yield _parse(line)
        if len(self._buffer) > self._limit:
            raise ConnectionLostError("its message is too long")

    def next_message(self) -> Message:
        """Wait for one message; for conversations in which nothing else is expected.

        Raises:
            ConnectionLostError: nothing came in time.
        """
        while True:
            for message in self.receive():
                return message

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def connect(addresses: Sequence[str], port: int, token: str) -> Channel:
    """Reach the launcher at the first of its addresses that answers and proves to be it.

    Raises:
        ConnectionLostError: none does; the message says why, for each.
    """
    reasons = []
    for address in addresses:
        try:
            return _connect_to(address, port, token)
        except (OSError, ConnectionLostError) as error:
            reasons.append(f"{address}: {_reason(error) if isinstance(error, OSError) else error}")
    raise ConnectionLostError(f"the launcher cannot be reached at port {port} ({'; '.join(reasons)})")


def _connect_to(address: str, port: int, token: str) -> Channel:
    channel = Channel(socket.create_connection((address, port), timeout=_CONNECT_SECONDS))
    try:
        asked, mine = channel.next_message(), secrets.token_hex(32)
        channel.send("proof", proof=prove(token, "node", str(asked.get("challenge")), mine), challenge=mine)
        answer = channel.next_message()
        expected = prove(token, "launcher", mine, str(asked.get("challenge")))
        if not hmac.compare_digest(str(answer.get("proof")), expected):
            raise ConnectionLostError("it is not the launcher of this job")
    except ConnectionLostError:
        channel.close()
        raise
    channel.trust()
    return channel


def own_addresses(fallback: str) -> list[str]:
    """This host's addresses, as `hostname -I` lists them.

    Args:
        fallback: taken where there is no such command.
    """
    command = shutil.which("hostname")
    if command is None:
        return [fallback]
    listed = subprocess.run([command, "-I"], capture_output=True, text=True, timeout=10, check=False)
    return listed.stdout.split() or [fallback]


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except ValueError as error:
        raise ConnectionLostError("what it says cannot be understood") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ConnectionLostError("what it says cannot be understood")
    return message


def _notice_silence(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Other systems than Linux have some of these, or none: there a silent peer is noticed later.
    for name, value in (*_KEEPALIVE.items(), ("TCP_USER_TIMEOUT", SILENCE_SECONDS * 1000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _reason(error: OSError) -> str:
    return "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)

"""The control connection between the launcher and its agents: one message per line, over TCP.

Both sides first prove that they know the token of the launch (`neox_launcher.protocol.handshake`). From then
on the channel is sealed: every line starts with an HMAC of the message and of its number, by a key that only
these two processes have for this direction. Lines that were injected, changed, repeated, reordered or sent
back are refused. Messages are not encrypted and, like the traffic of torch, require a trusted network.

The kernel detects a peer that disappears (a dead host, a cut link) within `SILENCE_SECONDS`. For a process
that is only stopped (SIGSTOP) the kernel keeps the connection alive until its receive buffer is full.
"""

import hmac
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from neox_config.errors import LaunchError
from neox_launcher.protocol.messages import (
    Message,
    decode_line,
    encode_message,
    own_version,
)

__all__ = [
    "LONGEST_UNSEALED",
    "SILENCE_SECONDS",
    "Channel",
    "ConnectionLostError",
    "Seal",
    "different_versions",
    "listen_everywhere",
    "own_addresses",
    "reason_of",
    "unusable_port",
]

SILENCE_SECONDS = 30
LONGEST_UNSEALED = 2048
"""Length in bytes that no message of the handshake exceeds."""
_NOTICE_SILENCE = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": SILENCE_SECONDS * 1000,
}
_SEND_SECONDS = float(SILENCE_SECONDS)
_LONGEST = 32 * 1024 * 1024
_CHUNK = 64 * 1024
_DIGEST = "sha256"
_MARK_LENGTH = 64


class ConnectionLostError(Exception):
    """The peer closed the connection, does not answer, or violates the protocol; see the message."""


@dataclass(slots=True, kw_only=True)
class Seal:
    """What a sealed channel knows about its peer.

    Args:
        sending: key of the messages that this side sends.
        receiving: key of the messages that the peer sends.
        num_sent: number of messages that this side has sent.
        num_received: number of messages that the peer has sent.
    """

    sending: bytes = field(repr=False)
    receiving: bytes = field(repr=False)
    num_sent: int = 0
    num_received: int = 0

    def close(self, message: bytes) -> bytes:
        """Return the line of the next message that this side sends."""
        mark = _mark(self.sending, self.num_sent, message)
        self.num_sent += 1
        return mark + message

    def open(self, line: bytes) -> bytes:
        """Return the message in the next line of the peer.

        Raises:
            ConnectionLostError: the peer did not send this line at this point.
        """
        mark, message = line[:_MARK_LENGTH], line[_MARK_LENGTH:]
        if not hmac.compare_digest(mark, _mark(self.receiving, self.num_received, message)):
            raise ConnectionLostError(
                "its message is not authentic (injected, changed, repeated or reordered)"
            )
        self.num_received += 1
        return message


def _mark(key: bytes, number: int, message: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + message, _DIGEST).hex().encode()


class Channel:
    """Sends and receives messages over a connected socket.

    Args:
        connection: connected socket, owned by the channel. Until `seal` is called, messages must be short.
        patience: seconds to wait for the peer until then; 0 for a peer that must not delay this process.
    """

    def __init__(self, connection: socket.socket, *, patience: float = _SEND_SECONDS) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._num_searched = 0
        self._seal: Seal | None = None
        connection.settimeout(patience)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Systems other than Linux lack some of these options and detect a silent peer later.
        for name, value in _NOTICE_SILENCE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def address(self) -> str:
        """Local address of the connection."""
        return str(self._socket.getsockname()[0])

    def seal(self, seal: Seal) -> None:
        """Seal the channel: the peer is authenticated, and longer messages are accepted from now on."""
        self._seal = seal
        self._socket.settimeout(_SEND_SECONDS)

    def send(self, kind: str, **content: Any) -> None:
        """Send one message.

        Raises:
            ConnectionLostError: the connection is lost.
        """
        self.send_encoded(encode_message(kind, content))

    def send_encoded(self, message: bytes) -> None:
        """Send the result of `encode_message`, which several channels may share.

        Raises:
            ConnectionLostError: the connection is lost.
        """
        line = message if self._seal is None else self._seal.close(message)
        try:
            self._socket.sendall(line + b"\n")
        except OSError as error:
            raise ConnectionLostError(reason_of(error)) from error

    def receive(self) -> Iterator[Message]:
        """Wait for data and yield the messages that it completes.

        Raises:
            ConnectionLostError: the connection is closed, or the peer violates the protocol.
        """
        self.read()
        yield from self.messages()

    def read(self) -> None:
        """Wait for data, of which `messages` returns the complete messages.

        Raises:
            ConnectionLostError: the connection is closed.
        """
        try:
            data = self._socket.recv(_CHUNK if self._seal else LONGEST_UNSEALED)
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLostError(reason_of(error)) from error
        if not data:
            raise ConnectionLostError("it closed the connection")
        self._buffer += data

    def messages(self) -> Iterator[Message]:
        """Yield the complete messages among the data that was read.

        Raises:
            ConnectionLostError: the peer violates the protocol.
        """
        while (end := self._buffer.find(b"\n", self._num_searched)) >= 0:
            self._check_length(end)
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._num_searched = 0
            try:
                yield decode_line(line if self._seal is None else self._seal.open(line))
            except (ValueError, RecursionError) as error:
                raise ConnectionLostError("its message is malformed") from error
        self._num_searched = len(self._buffer)
        self._check_length(len(self._buffer))

    def next_message(self) -> Message:
        """Wait for one message; only for exchanges in which no other message is expected.

        Raises:
            ConnectionLostError: no message arrived in time, or the connection is lost.
        """
        while True:
            for message in self.messages():
                return message
            self.read()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _check_length(self, length: int) -> None:
        """Refuse a long line before it is parsed, and before all of it has arrived."""
        if length > (_LONGEST if self._seal else LONGEST_UNSEALED):
            raise ConnectionLostError("its message is too long")


def different_versions(who: str, theirs: str) -> str:
    """Describe two versions that cannot work together, with the remedy.

    Args:
        who: the side that runs the other version.
        theirs: its version.
    """
    return (
        f"{who} runs neox-launcher {theirs}, this host {own_version()}; install the same version on all hosts"
    )


def listen_everywhere(port: int, setting: str, backlog: int) -> socket.socket:
    """Listen on all addresses of this machine, in IPv4 and IPv6 if available.

    Args:
        port: requested port; 0 for a free one.
        setting: what sets the port.
        backlog: connections that may wait to be accepted; the kernel may apply a lower limit.

    Raises:
        LaunchError: the port cannot be used.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=backlog)
    except OSError as error:
        raise unusable_port(port, setting, error) from error


def unusable_port(port: int, setting: str, error: OSError) -> LaunchError:
    """Return the error for a port on which this machine cannot listen, and what sets it."""
    return LaunchError(
        f"{setting}: {port} cannot be used on this machine: {os.strerror(error.errno or 0)}; choose another "
        "port, or end the process that uses it"
    )


def own_addresses(fallback: str) -> list[str]:
    """Return the addresses of this host, as listed by `hostname -I`.

    Args:
        fallback: returned if the command is missing, does not end or prints nothing.
    """
    try:
        listed = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return [fallback]
    return listed.stdout.split() or [fallback]


def reason_of(error: OSError) -> str:
    """Return the cause of an error of a connection."""
    return "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)

"""The listening socket to which agents connect; it accepts those that prove that they know the token.

Any process that reaches the port can connect and send anything. A peer that has not proven that it knows the
token is a guest: whatever it sends, it can only lose its own connection. Guests are limited in number, in
time and in the length of their messages.
"""

import errno
import itertools
import resource
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from neox_config.errors import LaunchError
from neox_launcher.controller.terminal import print_message
from neox_launcher.plan.plan import Endpoint
from neox_launcher.protocol.channel import (
    Channel,
    ConnectionLostError,
    listen_everywhere,
    own_addresses,
    unusable_port,
)
from neox_launcher.protocol.handshake import Introduction
from neox_launcher.protocol.messages import Message, own_version

__all__ = ["Listener"]

_LOOPBACK = "127.0.0.1"
_BACKLOG = 4096
# A guest that has not proven within this time that it knows the token is dismissed.
_PROOF_SECONDS = 20.0
# Beyond this number the guest that has waited longest is dismissed. Guests use at most a quarter of the file
# descriptors of this process.
_MOST_GUESTS = 1024
_MOST_FILES = 65_536
# Connected agents are served between one batch of guests and the next.
_ACCEPTED_AT_ONCE = 64
_PAUSE_SECONDS = 0.1
_REPORT_SECONDS = 60.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

OnConnected = Callable[[Channel, Message], None]
OnOtherVersion = Callable[[str, str], None]


@dataclass(slots=True, eq=False)
class _Guest:
    """A peer that has not been let in.

    Args:
        channel: connection to it.
        address: its address.
        introduction: this side of the handshake.
        leave_by: time of `time.monotonic` by which it must have authenticated.
    """

    channel: Channel
    address: str
    introduction: Introduction
    leave_by: float


class Listener:
    """Accepts the connections of agents.

    Args:
        token: token of this launch.
        selector: waits for all connections; the data of each registration is a callable.
        on_connected: called with the channel of an authenticated agent, which it owns from then on, and the
            hello of the agent.
        on_other_version: called with the host of an authenticated agent that runs another version, and that
            version; its connection is closed.
        is_local: listen on the loopback interface only, on a free port.
        endpoint: where to listen unless `is_local`.

    Raises:
        LaunchError: the endpoint cannot be used.
    """

    def __init__(
        self,
        token: str,
        selector: selectors.BaseSelector,
        on_connected: OnConnected,
        *,
        on_other_version: OnOtherVersion,
        is_local: bool,
        endpoint: Endpoint,
    ) -> None:
        self.token, self._selector = token, selector
        self._on_connected, self._on_other_version = on_connected, on_other_version
        # In the order of their arrival; the dict serves as an ordered set.
        self._unauthenticated: dict[_Guest, None] = {}
        self._authenticated: set[_Guest] = set()
        # A port scanner causes many refusals.
        self._num_unreported, self._next_report = 0, 0.0
        self._resume_at: float | None = None
        self._most_guests = min(_MOST_GUESTS, _allow_many_connections() // 4)
        self._socket = _listen(Endpoint(address=_LOOPBACK) if is_local else endpoint)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        given = _LOOPBACK if is_local else endpoint.address
        self.addresses = (given,) if given else tuple(own_addresses(fallback=socket.gethostname()))
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    @property
    def is_open(self) -> bool:
        """Whether connections are accepted."""
        return self._socket.fileno() >= 0

    def tick(self) -> None:
        """Dismiss guests whose time is over; to be called several times a second."""
        now = time.monotonic()
        for guest in list(itertools.takewhile(lambda guest: guest.leave_by < now, self._unauthenticated)):
            self._dismiss(guest, f"it did not authenticate within {_PROOF_SECONDS:g} s")
        if self._resume_at is not None and self._resume_at < now:
            self._resume_at = None
            self._selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close the port and the connections of all guests. May be called again."""
        if not self.is_open:
            return
        for guest in [*self._unauthenticated, *self._authenticated]:
            self._forget(guest)
            guest.channel.close()
        if self._resume_at is None:
            self._selector.unregister(self._socket)
        self._resume_at = None
        self._socket.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._make_room(error)
                    return
                continue  # The connection ended before it was accepted.
            self._meet(connection, str(address[0]))

    def _make_room(self, error: OSError) -> None:
        waiting = list(self._unauthenticated)
        for guest in waiting[: (len(waiting) + 1) // 2]:
            self._dismiss(guest, f"{error.strerror} (ulimit -n)")
        if not waiting:
            self._report("an agent", f"{error.strerror}; raise ulimit -n on this machine")
        # The connections that still wait would wake the selector again at once.
        self._selector.unregister(self._socket)
        self._resume_at = time.monotonic() + _PAUSE_SECONDS

    def _meet(self, connection: socket.socket, address: str) -> None:
        if len(self._unauthenticated) >= self._most_guests:
            self._dismiss(next(iter(self._unauthenticated)), "more connections wait than can be served")
        try:
            channel = Channel(connection, patience=0)
        except OSError:  # It has ended already.
            connection.close()
            return
        introduction = Introduction(self.token, channel)
        guest = _Guest(channel, address, introduction, time.monotonic() + _PROOF_SECONDS)
        self._unauthenticated[guest] = None
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._hear(guest))
        try:
            guest.introduction.start()
        except ConnectionLostError as error:
            self._dismiss(guest, str(error))

    def _hear(self, guest: _Guest) -> None:
        hello = None
        try:
            guest.channel.read()
            for message in guest.channel.messages():
                if guest in self._unauthenticated:
                    guest.introduction.check(message)
                    del self._unauthenticated[guest]
                    self._authenticated.add(guest)
                elif message["kind"] == "hello":
                    hello = message
                    break
                else:
                    raise ConnectionLostError("its first message is not the hello of an agent")
        except ConnectionLostError as error:
            # An agent prints the reason on its own host.
            self._dismiss(guest, str(error))
            return
        except Exception as error:
            # Whatever a guest sends must not end the launch.
            self._dismiss(guest, f"its message caused {type(error).__name__}")
            return
        introduction = guest.introduction
        if guest in self._authenticated and introduction.version != own_version():
            self._forget(guest)
            guest.channel.close()
            self._on_other_version(introduction.host, introduction.version)
        elif hello is not None:
            self._forget(guest)
            self._on_connected(guest.channel, hello)

    def _forget(self, guest: _Guest) -> None:
        self._unauthenticated.pop(guest, None)
        self._authenticated.discard(guest)
        self._selector.unregister(guest.channel)

    def _dismiss(self, guest: _Guest, reason: str) -> None:
        if guest in self._unauthenticated or guest in self._authenticated:
            self._report(guest.address, reason)
            self._forget(guest)
            guest.channel.close()

    def _report(self, address: str, reason: str) -> None:
        """Report a refused connection; at most one line a minute."""
        self._num_unreported += 1
        if time.monotonic() >= self._next_report:
            others = self._num_unreported - 1
            more = f"; {others:,} more since the last report" if others else ""
            print_message(f"neox-launch: refused a connection from {address}: {reason}{more}\n")
            self._num_unreported, self._next_report = 0, time.monotonic() + _REPORT_SECONDS


def _allow_many_connections() -> int:
    """Raise the limit of open files: one connection per host, under MPI per rank, may exceed 1,024.

    Returns:
        The new limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_FILES
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def _listen(endpoint: Endpoint) -> socket.socket:
    """Listen on an address of this machine, or on all, in IPv4 and IPv6 if available.

    Raises:
        LaunchError: the address is unknown, or the port cannot be used.
    """
    if endpoint.address is None:
        return listen_everywhere(endpoint.port, endpoint.port_from, _BACKLOG)
    try:
        found = socket.getaddrinfo(endpoint.address, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            f"launcher-address: {endpoint.address} cannot be resolved on this machine; correct it, or leave "
            "it out to use all addresses",
            code="unknown-address",
        ) from error
    for family, _, _, _, address in found:
        try:
            return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise unusable_port(endpoint.port, endpoint.port_from, error) from error
    # For example in a container, whose host forwards the port.
    print_message(
        f"neox-launch: launcher-address {endpoint.address} is not an address of this machine: listening on "
        "all addresses, and expecting that connections are forwarded\n"
    )
    return listen_everywhere(endpoint.port, endpoint.port_from, _BACKLOG)

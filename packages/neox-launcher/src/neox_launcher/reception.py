"""Where nodes report to the launcher: a listening socket that lets in who proves to know the token."""

import hmac
import resource
import selectors
import socket
from collections.abc import Callable
from secrets import token_hex

from neox_launcher.control import Channel, ConnectionLostError, Message, own_addresses, prove

__all__ = ["Reception"]

_LOOPBACK = "127.0.0.1"
# A stranger may knock as often as it likes, but holds no more than so many connections.
_MOST_GUESTS = 16_384
_MOST_FILES = 65_536

Welcome = Callable[[Channel, Message], None]


class Reception:
    """Lets nodes in.

    Args:
        token: of this launch.
        selector: gets a callable as data for everything to wait for.
        welcome: is given the channel of a node that has proved itself, and its hello; owns it from then on.
        is_local: listen on the loopback interface alone.
    """

    def __init__(
        self, token: str, selector: selectors.BaseSelector, welcome: Welcome, *, is_local: bool
    ) -> None:
        self.token, self._selector, self._welcome = token, selector, welcome
        self._guests: set[Channel] = set()
        _allow_many_connections()
        self._socket = _listen(_LOOPBACK if is_local else None)
        self.port = int(self._socket.getsockname()[1])
        self.addresses = (_LOOPBACK,) if is_local else tuple(own_addresses(fallback=_LOOPBACK))
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Let nobody in any more; may be called again."""
        if self._socket.fileno() < 0:
            return
        for guest in list(self._guests):
            self._dismiss(guest)
        self._selector.unregister(self._socket)
        self._socket.close()

    def _accept(self) -> None:
        connection, _ = self._socket.accept()
        if len(self._guests) >= _MOST_GUESTS:
            connection.close()
            return
        channel, challenge = Channel(connection), token_hex(32)
        self._guests.add(channel)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._hear(channel, challenge))
        try:
            channel.send("challenge", challenge=challenge)
        except ConnectionLostError:
            self._dismiss(channel)

    def _hear(self, channel: Channel, challenge: str) -> None:
        try:
            for message in channel.receive():
                if message["kind"] == "proof":
                    self._answer(channel, challenge, message)
                elif message["kind"] == "hello" and channel.is_trusted:
                    self._let_in(channel, message)
                else:
                    raise ConnectionLostError("it does not prove who it is")
        except ConnectionLostError:
            # Whoever it was: a node that cannot get in says so where it was started.
            self._dismiss(channel)

    def _answer(self, channel: Channel, challenge: str, message: Message) -> None:
        theirs = str(message.get("challenge"))
        expected = prove(self.token, "node", challenge, theirs)
        if not hmac.compare_digest(str(message.get("proof")), expected):
            raise ConnectionLostError("it does not know the token")
        channel.trust()
        channel.send("proof", proof=prove(self.token, "launcher", theirs, challenge))

    def _let_in(self, channel: Channel, hello: Message) -> None:
        self._guests.discard(channel)
        self._selector.unregister(channel)
        self._welcome(channel, hello)

    def _dismiss(self, channel: Channel) -> None:
        if channel in self._guests:
            self._guests.discard(channel)
            self._selector.unregister(channel)
            channel.close()


def _allow_many_connections() -> None:
    """One per node, under MPI one per rank: a usual limit of 1,024 open files is soon too small."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listen(address: str | None) -> socket.socket:
    """On one address, or on all of this machine, in both versions of IP where it has them."""
    if address is not None:
        return socket.create_server((address, 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)

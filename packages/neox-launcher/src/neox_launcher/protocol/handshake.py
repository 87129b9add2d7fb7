"""How the launcher and an agent recognize each other, before their channel is sealed.

The launcher sends a challenge; the agent answers with a proof that it knows the token of the launch and a
challenge of its own; the launcher answers with its proof. The token itself is not transmitted. A proof covers
everything that both sides have said, and the keys of the sealed channel follow from the same. These three
messages must not change from version to version, so that two versions can name each other; unknown fields
are ignored in them.
"""

import hmac
import json
import os
import random
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence

from neox_config.errors import LaunchError
from neox_launcher.protocol.channel import (
    Channel,
    ConnectionLostError,
    Seal,
    different_versions,
    reason_of,
)
from neox_launcher.protocol.messages import Message, own_version

__all__ = ["TOKEN_VARIABLE", "Introduction", "OtherVersionError", "connect", "new_token"]

TOKEN_VARIABLE = "NEOX_TOKEN"
_CONNECT_SECONDS = 5.0
_MOST_ATTEMPTS = 3
_RETRY_SECONDS = 0.5
_SECRET_BYTES = 32
_SECRET = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)
_LONGEST_TEXT = 100
_PRINTABLE = re.compile(f".{{0,{_LONGEST_TEXT}}}")
_LAUNCHER, _AGENT = "launcher", "agent"


class OtherVersionError(LaunchError):
    """The launcher runs another version."""


class _CutOffError(ConnectionLostError):
    """The launcher ended the connection during the handshake, which it also does when too many wait."""


def new_token() -> str:
    """Return a new secret token for one launch."""
    return secrets.token_hex(_SECRET_BYTES)


class Introduction:
    """The launcher's side of one handshake.

    Args:
        token: token of the launch.
        channel: connection to an unknown peer.
    """

    def __init__(self, token: str, channel: Channel) -> None:
        self._token, self._channel = token, channel
        self._challenge = secrets.token_hex(_SECRET_BYTES)
        self.host = ""
        """Name of the agent's host, once it is authenticated."""
        self.version = ""
        """Version of the agent's program, once it is authenticated."""

    def start(self) -> None:
        """Send the challenge.

        Raises:
            ConnectionLostError: the connection is lost.
        """
        self._channel.send("challenge", challenge=self._challenge, version=own_version())

    def check(self, message: Message) -> None:
        """Check the answer to the challenge, send this side's proof and seal the channel.

        Raises:
            ConnectionLostError: the peer does not know the token, or the connection is lost.
        """
        if message["kind"] != "proof":
            raise ConnectionLostError("it did not authenticate")
        theirs, proof = _text(message, "challenge", _SECRET), _text(message, "proof", _SECRET)
        host, version = _text(message, "host"), _text(message, "version")
        said = (self._challenge, own_version(), theirs, version, host)
        if not hmac.compare_digest(proof, _derive(self._token, f"proof of {_AGENT}", *said)):
            raise ConnectionLostError("it does not know the token of this launch")
        self._channel.send("proof", proof=_derive(self._token, f"proof of {_LAUNCHER}", *said))
        _seal(self._channel, self._token, said, _LAUNCHER, _AGENT)
        self.host, self.version = host, version


def connect(addresses: Sequence[str], port: int, token: str, *, host: str) -> Channel:
    """Connect to the launcher at the first of its addresses that answers and authenticates.

    Args:
        addresses: addresses of the launcher.
        port: its port.
        token: token of the launch.
        host: name of this host.

    Raises:
        ConnectionLostError: no address works; the message lists the reason for each.
        OtherVersionError: the launcher runs another version.
    """
    reasons = []
    for address in addresses:
        try:
            return _connect_to(address, port, token, host)
        except (OSError, ConnectionLostError) as error:
            reasons.append(f"{address}: {reason_of(error) if isinstance(error, OSError) else error}")
    raise ConnectionLostError(f"the launcher cannot be reached at port {port} ({'; '.join(reasons)})")


def _connect_to(address: str, port: int, token: str, host: str) -> Channel:
    for attempt in range(1, _MOST_ATTEMPTS):
        try:
            return _connect_once(address, port, token, host)
        except _CutOffError:
            # Other agents, or strangers, may have kept the launcher busy.
            time.sleep(_RETRY_SECONDS * attempt * (0.5 + random.random()))
    return _connect_once(address, port, token, host)


def _connect_once(address: str, port: int, token: str, host: str) -> Channel:
    channel = Channel(socket.create_connection((address, port), timeout=_CONNECT_SECONDS))
    try:
        # As `_text` accepts it.
        shown = "".join(letter if letter.isprintable() else "?" for letter in host[:_LONGEST_TEXT])
        _introduce(channel, token, shown)
    except BaseException:
        channel.close()
        raise
    return channel


def _introduce(channel: Channel, token: str, host: str) -> None:
    """Carry out the agent's side of the handshake."""
    mine = secrets.token_hex(_SECRET_BYTES)
    asked = _answer(channel)
    theirs, version = _text(asked, "challenge", _SECRET), _text(asked, "version")
    said = (theirs, version, mine, own_version(), host)
    proof = _derive(token, f"proof of {_AGENT}", *said)
    channel.send("proof", proof=proof, challenge=mine, version=own_version(), host=host)
    answer = _answer(channel)
    proof = _text(answer, "proof", _SECRET)
    if not hmac.compare_digest(proof, _derive(token, f"proof of {_LAUNCHER}", *said)):
        raise ConnectionLostError("it is not the launcher of this job")
    if version != own_version():
        raise OtherVersionError(different_versions("the launcher", version))
    _seal(channel, token, said, _AGENT, _LAUNCHER)


def _answer(channel: Channel) -> Message:
    try:
        return channel.next_message()
    except ConnectionLostError as error:
        raise _CutOffError(str(error)) from error


def _derive(token: str, purpose: str, *said: str) -> str:
    """Return 64 hexadecimal digits that follow from the token, for one purpose in one handshake."""
    return hmac.digest(
        os.fsencode(token), json.dumps([purpose, *said], allow_nan=False).encode(), "sha256"
    ).hex()


def _seal(channel: Channel, token: str, said: Sequence[str], *sides: str) -> None:
    """Seal a channel, with a key for the messages of this side and one for those of the peer."""
    sending, receiving = (bytes.fromhex(_derive(token, f"messages of {side}", *said)) for side in sides)
    channel.seal(Seal(sending=sending, receiving=receiving))


def _text(message: Mapping[str, object], name: str, kind: re.Pattern[str] = _PRINTABLE) -> str:
    """Return a field that must be a short text of a kind."""
    value = message.get(name)
    if isinstance(value, str) and kind.fullmatch(value) and value.isprintable():
        return value
    raise ConnectionLostError(f"the {name} in its handshake is missing or malformed; is it another version?")

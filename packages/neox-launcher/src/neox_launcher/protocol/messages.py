"""The messages between the launcher and its agents: kinds, fields and types, and the version of this program.

Both sides exchange their versions when they connect, and refuse each other if these differ: see
`neox_launcher.protocol.handshake`. The version names the kinds and fields of the messages.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from neox_launcher.protocol.orders import AgentOrders, Place
from neox_launcher.protocol.outcome import Failure

__all__ = [
    "TO_AGENT",
    "TO_LAUNCHER",
    "Message",
    "decode_line",
    "encode_message",
    "own_version",
]

Message = dict[str, Any]

_PACKAGE = "neox-launcher"

TO_LAUNCHER: Mapping[str, Mapping[str, Any]] = {
    # One of number (of the host in the plan), name (of the host) and rank (under MPI) is set.
    "hello": {
        "host": str,
        "addresses": list[str],
        "time": float,
        "number": int | None,
        "name": str | None,
        "rank": int | None,
    },
    "ready": {"port": int | None},
    "refused": {"message": str},
    "output": {"rank": int, "stream": str, "text": str},
    # The status is that of rank 0, as written by finite_json; empty if it has not changed.
    "progress": {"ranks": dict[str, int], "status": dict[str, Any]},
    "trouble": {},
    "signal": {"number": int},
    "interrupted": {"is_passed_on": bool},
    "dumped": {"ranks": dict[str, dict[str, str]]},
    "ended": {"failures": list[dict[str, Any]], "overran": list[int], "facts": dict[str, Any]},
}
"""Kind -> field -> type of the messages of agents."""

TO_AGENT: Mapping[str, Mapping[str, Any]] = {
    "orders": {"orders": dict[str, Any]},
    "place": {"place": dict[str, Any]},
    "start": {"master_addr": str, "master_port": int},
    "interrupt": {},
    "stop": {"number": int},
    "kill": {},
    "dump": {},
    "leave": {"exit_code": int},
}
"""Kind -> field -> type of the messages of the launcher."""


@cache
def own_version() -> str:
    """Return the version of this program and of its messages, which must be the same on all hosts.

    The second part distinguishes two development states with the same version number.
    """
    try:
        number = version(_PACKAGE)
    except PackageNotFoundError:
        number = "unknown"
    # Names alone: the way in which a type is printed depends on the version of Python.
    names = [[kind, *content] for schema in (TO_LAUNCHER, TO_AGENT) for kind, content in schema.items()]
    names += [[field.name for field in fields(carried)] for carried in (AgentOrders, Place, Failure)]
    return f"{number} (messages {hashlib.sha256(repr(names).encode()).hexdigest()[:8]})"


def encode_message(kind: str, content: Mapping[str, Any]) -> bytes:
    """Return a message as one line of ASCII, without its end."""
    return json.dumps({"kind": kind, **content}, allow_nan=False).encode("ascii")


def decode_line(line: bytes) -> Message:
    """Parse the output of `encode_message`.

    Raises:
        ValueError: it is not a JSON object with a kind.
        RecursionError: it is nested too deeply.
    """
    message = json.loads(line.decode("ascii"))
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("it has no kind")
    return message

"""The messages between the launcher and its agents: kinds, fields and types, and the version of this program.

Both sides exchange their versions when they connect, and refuse each other if these differ: see
`neox_launcher.protocol.handshake`. A message that is not listed here therefore comes from a modified program.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import GenericAlias, UnionType
from typing import Any, get_args, get_origin

from neox_launcher.protocol.orders import AgentOrders, Place
from neox_launcher.protocol.outcome import Failure

__all__ = [
    "TO_AGENT",
    "TO_LAUNCHER",
    "Message",
    "Schema",
    "UnknownMessageError",
    "check_message",
    "decode_line",
    "encode_message",
    "own_version",
]

Message = dict[str, Any]
Schema = Mapping[str, Mapping[str, Any]]

_PACKAGE = "neox-launcher"

TO_LAUNCHER: Schema = {
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

TO_AGENT: Schema = {
    "orders": {"orders": dict[str, Any]},
    "place": {"place": dict[str, Any]},
    "start": {"master_addr": str, "master_port": int},
    "interrupt": {},
    "pause": {},
    "resume": {},
    "stop": {"number": int},
    "kill": {},
    "dump": {},
    "leave": {"exit_code": int},
}
"""Kind -> field -> type of the messages of the launcher."""


class UnknownMessageError(Exception):
    """A message has an unknown kind, or other fields than this program expects."""


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
    """
    try:
        message = json.loads(line.decode("ascii"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("it has no kind")
    return message


def check_message(message: Message, schema: Schema) -> None:
    """Check the kind and the fields of a message.

    Args:
        message: result of `decode_line`.
        schema: `TO_LAUNCHER` or `TO_AGENT`.

    Raises:
        UnknownMessageError: the schema does not describe it; the message states the difference.
    """
    kind = message["kind"]
    if kind not in schema:
        raise UnknownMessageError(f"the message {kind[:40]!r}")
    expected = schema[kind]
    for name, value in message.items():
        if name != "kind" and not (name in expected and _fits(value, expected[name])):
            raise UnknownMessageError(f"the field {name[:40]!r} of the message {kind!r}")
    if len(message) <= len(expected):
        missing = next(name for name in expected if name not in message)
        raise UnknownMessageError(f"the field {missing!r} of the message {kind!r}")


def _fits(value: object, kind: Any) -> bool:
    """Return whether a JSON value has a type such as `list[str]` or `int | None`."""
    if kind is Any:
        return True
    if isinstance(kind, type) and not isinstance(kind, GenericAlias):
        is_number = kind is float and isinstance(value, int)
        return isinstance(value, bool) is (kind is bool) and (is_number or isinstance(value, kind))
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, arguments[0]) for one in value)
    return isinstance(value, dict) and all(_fits(one, arguments[1]) for one in value.values())

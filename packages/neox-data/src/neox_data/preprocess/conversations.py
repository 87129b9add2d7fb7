"""Read conversations from the records of a corpus, as chat templates expect them.

A message is an object with role and content, or with `from` and `value`, as in ShareGPT's data. Content may
be a list of parts of the type text.
"""

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["messages_in", "objects_in"]

# Roles of ShareGPT's data.
_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}


def messages_in(value: Any, name: str) -> list[dict[str, Any]]:
    """Return the messages of a conversation; raise ValueError with the reason if the value is none.

    Args:
        value: the value.
        name: what it is called, for errors.
    """
    if not isinstance(value, list):
        raise ValueError(f"{name} is {type(value).__name__}, not a list of messages")
    return [_message(each, f"message {number} of {name}") for number, each in enumerate(value, 1)]


def objects_in(value: Any, name: str) -> list[dict[str, Any]] | None:
    """Return a list of objects, which may be written as JSON; raise ValueError if the value is none.

    Args:
        value: the value; None is returned.
        name: what it is called, for errors.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is text, but not JSON ({error})") from None
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"{name} is not a list of objects")
    return value


def _message(value: Any, name: str) -> dict[str, Any]:
    message = value
    if isinstance(value, dict) and "role" not in value and {"from", "value"} <= value.keys():
        message = _of_sharegpt(value, name)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        keys = f" (its keys are {', '.join(map(repr, message))})" if isinstance(message, dict) else ""
        raise ValueError(f"{name} is not an object with role and content, or with from and value{keys}")
    content = message.get("content")
    # Null is the content of messages that only call tools.
    if content is None or isinstance(content, str):
        return message
    return message | {"content": _joined(content, name)}


def _of_sharegpt(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    role = _ROLES.get(str(value["from"]))
    if role is None:
        raise ValueError(
            f"{name} is from {value['from']!r}, which is none of {', '.join(_ROLES)}; write it with role and "
            "content"
        )
    others = {key: each for key, each in value.items() if key not in ("from", "value")}
    return {"role": role, "content": value["value"], **others}


def _joined(content: Any, name: str) -> str:
    """Return the text of content that is a list of parts."""
    if not isinstance(content, list):
        raise ValueError(f"the content of {name} is {type(content).__name__}, not text")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = "without a type" if kind is None else f"of the type {kind!r}"
            raise ValueError(f"the content of {name} is not text: it has a part {what}")
        texts.append(part["text"])
    return "".join(texts)

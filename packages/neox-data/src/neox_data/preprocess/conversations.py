"""Read conversations from the records of a corpus, as chat templates expect them.

A message is an object with role and content, or with `from` and `value`, as in ShareGPT's data. Content may
be a list of parts of the type text.
"""

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["is_empty", "messages_in", "objects_in"]

_EMPTY: tuple[Any, ...] = (None, "", "null", "[]", "{}", [], {})

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
    """Return a list of objects, which may be written as JSON, whole or one by one; None for none.

    Args:
        value: the value; for null, empty text and an empty object, the result is None.
        name: what it is called, for errors.

    Raises:
        ValueError: it is something else.
    """
    value = None if isinstance(value, str) and not value.strip() else _of_json(value, name)
    if value is None or value == {}:
        return None
    found = [_of_json(each, name) for each in value] if isinstance(value, list) else None
    if found is None or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"{name} is not a list of objects")
    return found


def is_empty(value: Any) -> bool:
    """Return whether the value of a key stands for none, also as JSON."""
    return (value.strip() if isinstance(value, str) else value) in _EMPTY


def _of_json(value: Any, name: str) -> Any:
    """Return a value, decoded if it is text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is text, but not JSON ({error})") from None


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

"""Read conversations from the records of a corpus, as chat templates expect them.

A message is an object with role and content, or with `from` and `value`, as in ShareGPT's data. Content may
be a list of parts of the type text. Each list, message and object may be written as JSON.

Arrow, and so parquet and the files of datasets, gives all objects of a column the same keys, with null where
an object has none. A null key is therefore no key, whatever the format; only a message without content has
null as content.
"""

from typing import Any

from neox_data.preprocess.texts import decode, of_json

__all__ = ["NULLS", "is_empty", "messages_in", "objects_in", "without_nulls"]

NULLS = (
    "nulls inside tool calls, tools or documents were left out, as Arrow adds them to objects that lack a "
    "key; to keep them, write arguments or tools as JSON text"
)
"""Note on nulls that a template does not see."""
_EMPTY: tuple[Any, ...] = (None, "", "null", "[]", "{}", [], {})

_OF_TEXT = {"role", "content"}
# Roles of ShareGPT's data.
_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}


def messages_in(value: Any, name: str, notes: set[str] | None = None) -> list[dict[str, Any]]:
    """Return the messages of a conversation; raise ValueError with the reason if the value is none.

    Args:
        value: the value.
        name: what it is called, for errors.
        notes: where `NULLS` is added if it applies.
    """
    messages = _of_json(value, name)
    if not isinstance(messages, list):
        raise ValueError(f"{name} is {type(messages).__name__}, not a list of messages")
    notes = set() if notes is None else notes
    return [_message(each, f"message {number} of {name}", notes) for number, each in enumerate(messages, 1)]


def objects_in(value: Any, name: str, notes: set[str] | None = None) -> list[dict[str, Any]] | None:
    """Return a list of objects, which may be written as JSON, whole or one by one; None for none.

    Nulls of objects that are written as JSON are kept: Arrow did not add these.

    Args:
        value: the value; for null, empty text and an empty object, the result is None.
        name: what it is called, for errors.
        notes: where `NULLS` is added if it applies.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, str | bytes):
        value = _of_json(value, name) if value.strip() else None
    else:
        value = without_nulls(value, set() if notes is None else notes)
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
    """Return a value, decoded if it is text, or bytes of a table."""
    if not isinstance(value, str | bytes):
        return value
    try:
        return of_json(decode(value, "utf-8") if isinstance(value, bytes) else value)
    except ValueError as error:
        raise ValueError(f"{name} is text, but {error}") from None


def without_nulls(value: Any, notes: set[str]) -> Any:
    """Return a value of JSON whose objects have no null keys, however deeply they are nested."""
    if not _has_null_keys(value):
        return value
    notes.add(NULLS)
    holder = [value]
    left: list[Any] = [holder]
    while left:
        one = left.pop()
        for place, each in one.items() if isinstance(one, dict) else enumerate(one):
            if isinstance(each, dict):
                one[place] = {key: inner for key, inner in each.items() if inner is not None}
            elif isinstance(each, list):
                one[place] = [*each]
            else:
                continue
            left.append(one[place])
    return holder[0]


def _has_null_keys(value: Any) -> bool:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            if None in one.values():
                return True
            left += one.values()
        elif isinstance(one, list):
            left += one
    return False


def _message(value: Any, name: str, notes: set[str]) -> dict[str, Any]:
    value = message = _of_json(value, name)
    # Fast path for nearly all messages.
    if isinstance(value, dict) and value.keys() >= _OF_TEXT and {*map(type, value.values())} == {str}:
        return value
    if isinstance(value, dict) and value.get("role") is None and {"from", "value"} <= value.keys():
        role = _ROLES.get(str(value["from"]))
        if role is None:
            raise ValueError(
                f"{name} is from {value['from']!r}, which is none of {', '.join(_ROLES)}; write it with role "
                "and content"
            )
        others = {
            key: each for key, each in value.items() if key not in ("from", "value") and each is not None
        }
        message = {"role": role, "content": value["value"], **others}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        keys = f" (its keys are {', '.join(map(repr, message))})" if isinstance(message, dict) else ""
        raise ValueError(f"{name} is not an object with role and content, or with from and value{keys}")
    # Null is the content of messages that only call tools.
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        content = _joined(content, name)
    shown = {
        key: each if key == "content" else without_nulls(each, notes)
        for key, each in message.items()
        if each is not None or key == "content"
    }
    return shown | {"content": content}


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

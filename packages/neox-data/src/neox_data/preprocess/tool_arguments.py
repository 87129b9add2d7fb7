"""Arguments of tool calls that are JSON text, as OpenAI's API writes them.

The templates of most models write arguments with `tojson`, which makes of a text a quoted text. Others take
them as text. Which of these a template does is found by rendering.
"""

from collections.abc import Callable, Sequence
from typing import Any

from neox_data.preprocess.texts import of_json

__all__ = ["DECODED", "decoded_arguments", "is_string"]

DECODED = (
    "arguments of tool calls that are JSON text were decoded, because the chat template writes objects; the "
    "tokens differ from those of transformers' apply_chat_template, which keeps the text"
)
"""Note on arguments that a template sees as objects."""

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str]
_CALLS = {"tool_calls", "function_call"}


class _Probe(str):
    """Arguments that no model writes.

    Attributes:
        is_tested: True once a template has tested whether they are text.
    """

    is_tested = False


def is_string(value: Any) -> bool:
    """Return whether a value is text: the test `string` of Jinja, which notes the use on arguments."""
    if isinstance(value, _Probe):
        value.is_tested = True
    return isinstance(value, str)


def decoded_arguments(messages: Sequence[Message], render: Render, notes: set[str]) -> Sequence[Message]:
    """Return the messages with arguments as objects, unless the template takes them as text.

    It does if it writes a text as it is, tests whether it is one, or fails with objects.

    Args:
        messages: the conversation.
        render: returns the text that the template makes of messages; raises ValueError if it fails.
        notes: where `DECODED` is added if it applies.

    Raises:
        ValueError: the template requires objects, and a text is not JSON.
    """
    found: list[str] = []
    _replaced(messages, found.append)
    if not any(map(_is_object, found)):
        return messages
    probe = _Probe('{"0probe0": ""}')
    is_text_accepted = True
    try:
        if probe in render(_replaced(messages, lambda _: probe)) or probe.is_tested:
            return messages
    except ValueError:
        is_text_accepted = False
    decoded = _replaced(messages, _decoded)
    if is_text_accepted:
        try:
            render(decoded)
        except ValueError:
            return messages
    notes.add(DECODED)
    return decoded


def _replaced(messages: Sequence[Message], change: Callable[[str], Any]) -> list[Message]:
    """Return the messages with changed arguments, where these are text."""
    return [
        message | {key: _changed(message[key], change) for key in _CALLS & message.keys()}
        for message in messages
    ]


def _changed(calls: Any, change: Callable[[str], Any]) -> Any:
    """Return a call of a tool, or a list of them, with changed arguments."""
    if isinstance(calls, list):
        return [_changed(call, change) for call in calls]
    if not isinstance(calls, dict):
        return calls
    call = {key: _changed(each, change) if key == "function" else each for key, each in calls.items()}
    if isinstance(call.get("arguments"), str):
        call["arguments"] = change(call["arguments"])
    return call


def _is_object(text: str) -> bool:
    """Return whether a text stands for an object; a tool without arguments may have an empty one."""
    return not text.strip() or text.lstrip().startswith("{")


def _decoded(text: str) -> Any:
    if not _is_object(text):
        return text
    try:
        return of_json(text) if text.strip() else {}
    except ValueError as error:
        raise ValueError(f"the arguments of a tool call are text, but {error}") from None

"""Messages about the fields of a request: what was received, and what to send instead."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from neox_config.counted import counted
from neox_model.serve.errors import ApiError, shown

__all__ = ["Wrong", "about_fields", "wrong_request"]

# Type of an error of pydantic -> what to send, with the limits of the error.
_EXPECTED: Mapping[str, str] = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "int_type": "a whole number",
    "less_than_equal": "a number of at most {le}",
    "literal_error": "{expected}",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a text",
}
_LONGEST_NAME = 60
# Longer requests with many errors have them for one reason.
_MOST_SHOWN = 10

Place = tuple[int | str, ...]
"""Names and numbers from the body to a value in it."""

_REMOVE = "remove it"
# Similarity of a name to the one that was meant; other fields of the API reach 0.7.
_SAME_WORD = 0.8


class Wrong(NamedTuple):
    """A field that is wrong.

    Attributes:
        place: where it is, such as `messages[2].role`.
        message: what is wrong, and what to do.
    """

    place: str
    message: str


def wrong_request(found: Sequence[Wrong], path: str) -> ApiError:
    """Return the error about all wrong fields of a request to a path."""
    messages = [each.message for each in found]
    if len(messages) > 1:
        numbered = " ".join(f"({number}) {text}" for number, text in enumerate(messages[:_MOST_SHOWN], 1))
        more = f" and {len(messages) - _MOST_SHOWN:,} more" if len(messages) > _MOST_SHOWN else ""
        messages = [f"{counted(len(messages), 'error')} in the request to {path}: {numbered}{more}"]
    return ApiError(400, messages[0], param=found[0].place)


def about_fields(
    error: ValidationError,
    body: Mapping[str, Any],
    names: Collection[str],
    *,
    forms: Mapping[str, str],
    elsewhere: Mapping[str, str],
) -> list[Wrong]:
    """Return what is wrong with the fields of a body, each field once.

    Args:
        error: of the validation.
        body: what was validated.
        names: fields that the body may have.
        forms: values of fields with several forms, in words.
        elsewhere: fields of other requests, and what to do instead.
    """
    remedies = [elsewhere[name] for name in body if name in elsewhere]
    found: dict[str, Wrong] = {}
    for detail in error.errors(include_url=False):
        place = _until_several_forms(detail["loc"], forms)
        written, name = _written(place), str(place[-1])
        kind = detail["type"] if place == detail["loc"] else "several forms"
        if kind == "extra_forbidden":
            remedy = elsewhere.get(name) or _nearest(name, names) if len(place) == 1 else _REMOVE
            if remedy == _REMOVE:
                value = shown(_value_at(body, place))
                message = f"{written}: {value} is not supported by this server; {remedy}"
            else:
                message = f"{written} is not a field of this request; {remedy}"
        elif kind == "missing":
            if any(name in remedy for remedy in remedies):
                continue
            message = f"{written} is missing; send {forms.get(name, 'it')}"
        else:
            model = str(detail.get("ctx", {}).get("class_name"))
            expected = forms.get(name) or forms.get(model) or _expected(detail)
            message = f"{written} is {shown(_value_at(body, place))}; send {expected}"
        found.setdefault(written, Wrong(written, message))
    return list(found.values())


def _until_several_forms(place: Place, forms: Mapping[str, str]) -> Place:
    """Return the place of the field that a message is about.

    Behind a field with several forms pydantic names the form. Messages are reported one by one.
    """
    names = (depth for depth, name in enumerate(place, 1) if name in forms and name != "messages")
    return place[: next(names, len(place))]


def _written(place: Place) -> str:
    """Return a place as `messages[2].role`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:_LONGEST_NAME]}" for part in place)
    return "".join(parts).removeprefix(".")


def _value_at(body: Any, place: Place) -> Any:
    for part in place:
        body = body[part]
    return body


def _expected(detail: ErrorDetails) -> str:
    limits = {name: _without_zeros(value) for name, value in detail.get("ctx", {}).items()}
    expected = _EXPECTED.get(detail["type"])
    return expected.format(**limits) if expected else f"another value ({detail['msg']})"


def _without_zeros(limit: Any) -> Any:
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def _nearest(name: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=_SAME_WORD)
    return f"use {near[0]}" if near else _REMOVE

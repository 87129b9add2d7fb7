"""Error messages about single values and names: what is wrong, and what to write instead."""

import re
from collections.abc import Sequence

from pydantic_core import ErrorDetails

from neox_config.names import answer
from neox_config.problems import as_block, did_you_mean, in_words
from neox_config.schema.config import all_parameters, parameter_named

__all__ = ["homes_of", "sentence_about", "written_elsewhere"]

# Error type of pydantic -> what is wrong.
_WRONG = {
    "string_type": "must be text",
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    "dict_type": "must be a block of parameters",
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list"),
    **dict.fromkeys(("too_short", "missing"), "has too few elements"),
    "too_long": "has too many elements",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "has an invalid format",
}
_LIMITS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def homes_of(path: Sequence[str], *, is_outside: bool) -> list[str]:
    """Return the parameters with the name of a path that belong in blocks below its position."""
    prefix = "" if is_outside else "".join(f"{part}." for part in path[:-1])
    name = path[0] if is_outside else path[-1]
    return [
        parameter.name
        for parameter in all_parameters()
        if parameter.name.startswith(prefix) and f".{parameter.name}".endswith(f".{name}")
    ]


def written_elsewhere(path: Sequence[str], homes: Sequence[str], *, is_outside: bool) -> str:
    """Return the remedy for a name that belongs in a block, or that other programs use."""
    # First: other programs have some of the names of our blocks (dtype) outside of any.
    found = answer(path[0]) if is_outside else None
    if found is not None and found.sentence:
        return found.sentence
    if found is not None:
        ours = found.parameters[0]
        meaning = _lower(parameter_named(ours).doc).partition(". ")[0].rstrip(".")
        return f"use {as_block(ours)} ({meaning})"
    if homes == [path[0]]:
        return f"write it as a block: {as_block(homes[0])}"
    return f"move it into its block: {' or '.join(homes)}" if homes else ""


def sentence_about(name: str, details: Sequence[ErrorDetails]) -> tuple[str, str]:
    """Return what is wrong with a value, and the remedy; details after the first are of other elements."""
    detail, parameter = details[0], parameter_named(name)
    kind, value = detail["type"], detail["input"]
    element = next((part + 1 for part in detail["loc"] if isinstance(part, int)), None)
    where = "" if element is None else f" in element {element}"
    if kind == "missing" and not parameter.type.startswith("list"):
        return f"is missing: {_lower(parameter.doc)}", f"add {as_block(name)}"
    if kind in _LIMITS:
        words, key = _LIMITS[kind]
        limit = detail["ctx"][key]
        shown = f"{int(limit):,}" if float(limit).is_integer() else f"{limit:g}"
        # A value above a limit usually has the wrong unit: percent or iterations instead of a fraction.
        return f"must be {words} {shown}{where}", parameter.doc if key in ("le", "lt") else ""
    if kind == "literal_error":
        # The choices of a list's elements are only in pydantic's message.
        choices = parameter.choices or re.findall(r"'([^']*)'", str(detail["ctx"]["expected"]))
        remedy = did_you_mean(str(value), choices) or f"use {', '.join(choices)}"
        return f"is not one of the choices{where}", remedy
    if kind not in _WRONG:
        what, _, remedy = str(detail["msg"]).partition("; ")
        return f"{_lower(what)}{where}", remedy
    remedy = ""
    if parameter.type.startswith("list"):
        written = f"write it like {in_words(parameter.default)}" if parameter.default else ""
        remedy = written or (f"write [{in_words(value)}]" if kind in ("tuple_type", "list_type") else "")
    elif parameter.choices:
        remedy = f"write {parameter.choices[0]}"
    elif isinstance(value, list | tuple):
        remedy = "write a single value, without brackets"
    return f"{_WRONG[kind]}{where}", remedy


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]

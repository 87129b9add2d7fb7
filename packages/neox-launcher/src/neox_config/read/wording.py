"""Error messages about single values and names: what is wrong, and what to write instead."""

import re
from collections.abc import Sequence
from functools import reduce
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from neox_config.problems import as_block, did_you_mean, in_words
from neox_config.read.aliases import (
    FOREIGN_CHOICES,
    FOREIGN_NAMES,
    FOREIGN_REMEDIES,
    foreign_remedy,
    usual_value,
)
from neox_config.schema.config import all_parameters, build_section, parameter_named, section_of, sections
from neox_config.schema.parameter import Parameter

__all__ = ["homes_of", "sentence_about", "written_elsewhere"]

# Error type of pydantic -> expected value.
_KINDS = {
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "dict_type": "a block of parameters",
}
# Parameters that take a list, and how to write a single value for all.
_AS_LIST = {"attention_config": 'write [[["{}"], "all"]]'}
# Whole numbers, and what to set in place of a fraction.
_FOR_FRACTIONS = {"train_epochs": "use train-iters: N for a part of a pass"}
# Whole numbers, and what to write in place of a text.
_FOR_TEXTS = {
    "stop_tokens": "write the id of a token, which tokenizer.json has in added_tokens, or its text in "
    "stop-strings"
}
# Switches that name a file in other programs, and what to do with it.
_FOR_PATHS = {
    "deepspeed": "the settings of DeepSpeed are parameters here; give their file as a further configuration "
    "file: neox-launch model.yml ds.json",
}
# Parameters that take a single value, and the parameters that take several.
_FOR_LISTS = {
    "data_path": "list several datasets in train-data-paths, and those for validation in valid-data-paths"
}

_LIMITS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def homes_of(path: Sequence[str], *, is_outside: bool) -> list[str]:
    """Return the parameters with the name of a path that belong in blocks below its position."""
    if is_outside and len(path) == 1 and "." in path[0]:
        return [parameter.name for parameter in all_parameters() if parameter.name == path[0]]
    outer = () if is_outside else path[:-1]
    prefix = "".join(f"{part}." for part in outer)
    name = path[len(outer)]
    return [
        parameter.name
        for parameter in all_parameters()
        if parameter.name.startswith(prefix) and parameter.name.endswith(f".{name}")
    ]


def written_elsewhere(path: Sequence[str], value: Any, homes: Sequence[str], *, is_outside: bool) -> str:
    """Return the remedy for a name that belongs in a block, or that other programs use."""
    if is_outside and path[0] in FOREIGN_REMEDIES:
        return foreign_remedy(path[0], in_words(value))
    if is_outside and path[0] in FOREIGN_NAMES:
        # First: other programs have some of the names of our blocks (dtype) outside of any.
        ours = FOREIGN_NAMES[path[0]]
        meaning = _lower(parameter_named(ours).doc).partition(". ")[0].rstrip(".")
        return f"use {_with_value(ours, value)} ({meaning})"
    if homes == [path[0]]:
        return f"write it as a block: {as_block(homes[0])}"
    if homes and not is_outside:
        return f"move it into {homes[0].rpartition('.')[0]}"
    return f"move it into its block: {' or '.join(homes)}" if homes else ""


def _with_value(name: str, value: Any) -> str:
    """Return how to write a parameter with a value of another program; without one that is not valid."""
    path, value = name.split("."), usual_value(name, value)
    section = section_of(path[0])
    values = reduce(lambda inner, part: {part: inner}, reversed(path), value)
    try:
        build_section(sections()[section], values)
    except ValidationError as error:
        # Other parameters may be missing.
        if any(detail["loc"][: len(path)] == tuple(path) for detail in error.errors()):
            return name if "." in name else name.replace("_", "-")
    return as_block(name, in_words(value))


def sentence_about(name: str, details: Sequence[ErrorDetails]) -> tuple[str, str]:
    """Return what is wrong with a value, and the remedy; details after the first are of other elements."""
    what, remedy = _sentence(name, details)
    value = details[0]["input"]
    # The choices of a parameter are of more use.
    if value == "auto" and details[0]["type"] != "literal_error":
        return what, "auto is filled in by transformers' Trainer; leave it out, or write the value"
    return what, _FOR_PATHS[name] if name in _FOR_PATHS and isinstance(value, str) else remedy


def _sentence(name: str, details: Sequence[ErrorDetails]) -> tuple[str, str]:
    detail = details[0]
    kind, context = detail["type"], detail.get("ctx", {})
    parameter = parameter_named(name)
    element = next((part + 1 for part in detail["loc"] if isinstance(part, int)), None)
    where = "" if element is None else f" in element {element}"
    if kind == "too_short" or (kind == "missing" and parameter.type.startswith("list")):
        return "has too few elements", _as_default(parameter) or "list at least one"
    if kind == "missing":
        meant = next((key for key in detail["input"] if FOREIGN_NAMES.get(key) == name), None)
        remedy = f"add {as_block(name)}" if meant is None else f"rename {meant} to {name.rpartition('.')[2]}"
        return f"is missing: {_lower(parameter.doc)}", remedy
    if kind in _LIMITS:
        words, key = _LIMITS[kind]
        # A value above a limit usually has the wrong unit: percent or iterations instead of a fraction.
        remedy = parameter.doc if key in ("le", "lt") else ""
        return f"must be {words} {_limit(context[key])}{where}", remedy
    if kind == "literal_error":
        return _about_choices(parameter, [each for each in details if each["type"] == kind])
    if kind in ("tuple_type", "list_type"):
        written = _AS_LIST.get(name, "write [{}]").format(in_words(detail["input"]))
        return "must be a list", _as_default(parameter) or written
    if kind == "string_too_short":
        return "must not be empty", parameter.doc
    if kind == "string_pattern_mismatch":
        return "has an invalid format", f"write {parameter.choices[0]}"
    if kind == "too_long":
        return "has too many elements", _as_default(parameter)
    if kind in _KINDS:
        instead = _FOR_TEXTS.get(name, "") if isinstance(detail["input"], str) else ""
        return f"must be {_KINDS[kind]}{where}", instead or _instead_of_list(parameter, detail["input"])
    what, _, remedy = str(detail["msg"]).partition("; ")
    return f"{_lower(what)}{where}", remedy or _instead_of_fraction(name, detail["input"])


def _about_choices(parameter: Parameter, details: Sequence[ErrorDetails]) -> tuple[str, str]:
    """Return what is wrong with values that are not among the choices of a parameter, and what to write."""
    # The choices of a list's elements are only in pydantic's message.
    choices = parameter.choices or re.findall(r"'([^']*)'", str(details[0]["ctx"]["expected"]))
    places = [str(part + 1) for detail in details for part in detail["loc"] if isinstance(part, int)]
    where = f" in element{'s' if len(places) > 1 else ''} {', '.join(places)}" if places else ""
    theirs: dict[str, list[str]] = {}
    remedies: list[str] = []
    for value in (str(detail["input"]) for detail in details):
        ours = FOREIGN_CHOICES.get(parameter.name, {}).get(value.lower())
        if ours is None:
            remedies.append(did_you_mean(value, choices) or f"use {', '.join(choices)}")
        else:
            theirs.setdefault(ours, []).append(value)
    mapped = [f"write {ours} for {', '.join(names)}" for ours, names in theirs.items()]
    return f"is not one of the choices{where}", "; ".join(dict.fromkeys([*mapped, *remedies]))


def _limit(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else f"{value:g}"


def _as_default(parameter: Parameter) -> str:
    """Return an example for a list of fixed length."""
    return f"write it like {in_words(parameter.default)}" if parameter.default else ""


def _instead_of_list(parameter: Parameter, value: Any) -> str:
    if not isinstance(value, list | tuple):
        return ""
    if parameter.name in _FOR_LISTS:
        return _FOR_LISTS[parameter.name]
    return f"write {parameter.choices[0]}" if parameter.choices else "write a single value, without brackets"


def _instead_of_fraction(name: str, value: Any) -> str:
    return _FOR_FRACTIONS.get(name, "") if isinstance(value, float) else ""


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]

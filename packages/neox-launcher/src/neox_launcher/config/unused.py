"""Values that were given and change nothing under the other settings: each gets a note."""

import re
from collections.abc import Iterator, Mapping

from neox_launcher.config.implied import NO_EFFECT
from neox_launcher.config.parameter import condition_of, inner_section
from neox_launcher.config.problems import Place, Problem, in_words
from neox_launcher.config.schema import NeoXConfig, field_named

__all__ = ["unused_values"]

# `used_when` of a parameter, where it names another one: "stage is 1 or 2", "pipe_parallel_size >= 1".
_CONDITION = re.compile(r"(?P<name>\w+) (is (?P<choices>.+)|>= (?P<least>\d+))")


def unused_values(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """A note for every given value, other than its default, whose `used_when` is not so here."""
    for name, place in places.items():
        declared = field_named(name)
        condition = None if declared is None else condition_of(declared)
        if declared is None or condition is None or name in NO_EFFECT:
            continue
        value = config.value_of(name)
        found = _CONDITION.fullmatch(condition)
        decider = None if found is None else _decider(name, found["name"])
        if found is None or decider is None or value == declared.default or _is_switched_off(config, name):
            continue
        decides = config.value_of(decider)
        if not _holds(found, decides):
            what = f"has no effect: it is used when {condition}; here it is {in_words(decides)}"
            yield Problem(name, what, value=in_words(value), place=place)


def _decider(name: str, other: str) -> str | None:
    """The parameter that a condition names, looked for in the block of `name` and in those around it."""
    outer = name.rpartition(".")[0]
    while True:
        candidate = f"{outer}.{other}" if outer else other
        declared = field_named(candidate)
        if declared is not None:
            return None if inner_section(declared) is not None else candidate
        if not outer:
            return None
        outer = outer.rpartition(".")[0]


def _holds(condition: re.Match[str], value: object) -> bool:
    if condition["least"] is not None:
        return isinstance(value, int) and value >= int(condition["least"])
    if condition["choices"] == "set":
        return value is not None
    choices = re.split(r", | or ", condition["choices"])
    return in_words(value).casefold() in [choice.casefold() for choice in choices]


def _is_switched_off(config: NeoXConfig, name: str) -> bool:
    """Whether a block around the parameter says `enabled: false`: nothing in it is expected to act."""
    outer = name.rpartition(".")[0]
    while outer:
        if field_named(f"{outer}.enabled") is not None and not config.value_of(f"{outer}.enabled"):
            return True
        outer = outer.rpartition(".")[0]
    return False

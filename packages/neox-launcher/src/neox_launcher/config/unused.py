"""Values that were given and change nothing under the other settings: each gets a note."""

import re
from collections.abc import Callable, Iterator, Mapping

from neox_launcher.config.attention_layers import types_in
from neox_launcher.config.implied import NO_EFFECT
from neox_launcher.config.optimizers import OPTIMIZER_FACTS
from neox_launcher.config.parameter import condition_of, inner_section
from neox_launcher.config.problems import Place, Problem, in_words
from neox_launcher.config.scalars import number_from
from neox_launcher.config.schema import NeoXConfig, field_named

__all__ = ["is_in_use", "is_understood", "unused_values"]

# `used_when` of a parameter, where it names another one: "stage is 1 or 2", "pipe_parallel_size >= 1".
_CONDITION = re.compile(r"(?P<name>\w+) (is (?P<not>not )?(?P<choices>.+)|>= (?P<least>\d+))")
_LAYERS = re.compile(r"attention_config has (?P<kinds>.+) layers")
# Where it asks more than one value.
_OTHERS: Mapping[str, Callable[[NeoXConfig], bool]] = {
    "an init method is normal or scaled_normal": lambda config: (
        not {"normal", "scaled_normal"}.isdisjoint(
            {config.model.init_method, config.model.output_layer_init_method}
        )
    ),
    "training is in fp16": lambda config: config.precision.is_fp16,
    "the optimizer decays weights": lambda config: (
        config.optimizer.optimizer.kind not in OPTIMIZER_FACTS
        or OPTIMIZER_FACTS[config.optimizer.optimizer.kind].decays_weights
    ),
}


def unused_values(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """A note for every given value, other than its default, whose `used_when` is not so here."""
    for name, place in places.items():
        declared = field_named(name)
        condition = None if declared is None else condition_of(declared)
        if declared is None or condition is None or name in NO_EFFECT:
            continue
        value = config.value_of(name)
        if value == declared.default or _is_switched_off(config, name):
            continue
        what = _why_unused(name, condition, config)
        if what:
            yield Problem(name, f"has no effect: {what}", value=in_words(value), place=place)


def is_in_use(name: str, config: NeoXConfig) -> bool:
    """Whether a parameter can have an effect under the other settings; True where that cannot be known."""
    declared = field_named(name)
    condition = None if declared is None else condition_of(declared)
    if _is_switched_off(config, name):
        return False
    return condition is None or not _why_unused(name, condition, config)


def is_understood(name: str, condition: str) -> bool:
    """Whether a configuration can tell if the condition of a parameter holds."""
    found = _CONDITION.fullmatch(condition)
    by_value = found is not None and _decider(name, found["name"]) is not None
    return by_value or condition in _OTHERS or _LAYERS.fullmatch(condition) is not None


def _why_unused(name: str, condition: str, config: NeoXConfig) -> str:
    """Why a condition does not hold; empty where it does, or where the configuration cannot tell."""
    if condition in _OTHERS:
        return "" if _OTHERS[condition](config) else f"it is used when {condition}"
    layers = _LAYERS.fullmatch(condition)
    if layers is not None:
        kinds = types_in(config)
        is_used = not kinds.isdisjoint(_listed(layers["kinds"]))
        return "" if is_used else f"it is used when {condition}; here it has {', '.join(sorted(kinds))}"
    found = _CONDITION.fullmatch(condition)
    decider = None if found is None else _decider(name, found["name"])
    if found is None or decider is None:
        return ""
    decides = config.value_of(decider)
    return "" if _holds(found, decides) else f"it is used when {condition}; here it is {in_words(decides)}"


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
    is_listed = any(_is(choice, value) for choice in _listed(condition["choices"]))
    return is_listed is (condition["not"] is None)


def _listed(words: str) -> list[str]:
    return re.split(r", | or ", words)


def _is(choice: str, value: object) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number_from(choice) == value
    return in_words(value).casefold() == choice.casefold()


def _is_switched_off(config: NeoXConfig, name: str) -> bool:
    """Whether a block around the parameter says `enabled: false`: nothing in it is expected to act."""
    outer, _, own = name.rpartition(".")
    if own == "enabled":
        outer = outer.rpartition(".")[0]
    while outer:
        if field_named(f"{outer}.enabled") is not None and not config.value_of(f"{outer}.enabled"):
            return True
        outer = outer.rpartition(".")[0]
    return False

"""Rules between parameters: one small function per rule. All rules run, and all findings are reported.

Every public function of the modules in this package is a rule; each module covers one subject. A rule ends
where it reads a value which is itself invalid. Rules about the number of devices are in `resolve.py`.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from inspect import isfunction

from neox_config.problems import Place, Problem, in_words, place_near
from neox_config.schema.config import NeoXConfig
from neox_config.schema.parameter import InvalidValue

__all__ = ["RULES", "broken_rules"]

Rule = Callable[[NeoXConfig], Iterator[Problem]]


def _rules_of(subject: str) -> Iterator[Rule]:
    module = import_module(f"{__name__}.{subject}")
    for name, value in vars(module).items():
        if isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            yield value


# Sorted by module name, so that findings have a fixed order.
RULES: tuple[Rule, ...] = tuple(
    rule
    for subject in sorted(found.name for found in pkgutil.iter_modules(__path__))
    for rule in _rules_of(subject)
)


def broken_rules(config: NeoXConfig, places: Mapping[str, Place]) -> list[Problem]:
    """Run all rules and return their findings.

    Args:
        config: configuration to check; reading a value that was invalid raises InvalidValue.
        places: location of each given value.
    """
    problems: list[Problem] = []
    for rule in RULES:
        with suppress(InvalidValue):
            code = f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"
            for found in rule(config):
                value = in_words(config.value_of(found.name))
                placed = found.located(place_near(places, found.name), value)
                problems.append(replace(placed, code=found.code or code))
    return problems

"""Rules between parameters: one small function per rule. All rules run, and all findings are reported.

Every public function of the modules in this package, and of `rules.py` of an extra, is a rule; each module
covers one subject. A rule ends where it reads a value which is itself invalid. Rules about the number of
devices are in `resolve.py`.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from inspect import isfunction

from neox_config import extras
from neox_config.problems import Place, Problem, in_words, place_near
from neox_config.schema.config import NeoXConfig
from neox_config.schema.parameter import InvalidValue

__all__ = ["RULES", "broken_rules"]

Rule = Callable[[NeoXConfig], Iterator[Problem]]


_MODULES = (
    *(f"{__name__}.{found.name}" for found in pkgutil.iter_modules(__path__)),
    *(f"{extras.__name__}.{found.name}.rules" for found in pkgutil.iter_modules(extras.__path__)),
)


def _rules_of(name: str) -> Iterator[Rule]:
    module = import_module(name)
    for name, value in vars(module).items():
        if isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            yield value


# Sorted by subject, so that findings have a fixed order.
RULES: tuple[Rule, ...] = tuple(
    rule
    for name in sorted(_MODULES, key=lambda name: name.removesuffix(".rules").rpartition(".")[2])
    for rule in _rules_of(name)
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
            # `rules/model.py`, or `extras/compression/rules.py`.
            subject = rule.__module__.removesuffix(".rules").rpartition(".")[2]
            code = f"{subject}.{rule.__name__}"
            for found in rule(config):
                value = config.value_of(found.name)
                shown = "" if value in (None, {}) else in_words(value)
                placed = found.located(place_near(places, found.name), shown)
                problems.append(replace(placed, code=found.code or code))
    return problems

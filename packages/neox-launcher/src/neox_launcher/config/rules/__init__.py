"""Rules between parameters: one small function each, named for what it says; all are run, all findings told.

Every public function of the files in this folder is a rule; a file has those of one subject. A rule that
reads a value which is itself wrong is skipped: there is nothing to compare yet. Rules about the number of
devices are in `resolve.py`.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from inspect import isfunction

from neox_launcher.config.problems import Place, Problem, in_words, place_of
from neox_launcher.config.schema import NeoXConfig

__all__ = ["RULES", "broken_rules"]

Rule = Callable[[NeoXConfig], Iterator[Problem]]


def _rules_of(subject: str) -> Iterator[Rule]:
    module = import_module(f"{__name__}.{subject}")
    for name, value in vars(module).items():
        if isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            yield value


# In the order of the files' names, as one is told.
RULES: tuple[Rule, ...] = tuple(
    rule
    for subject in sorted(found.name for found in pkgutil.iter_modules(__path__))
    for rule in _rules_of(subject)
)


def broken_rules(config: NeoXConfig, places: Mapping[str, Place], *, is_partial: bool) -> list[Problem]:
    """What the rules say about a configuration.

    Args:
        config: may lack fields when `is_partial`.
        places: where given values were written.
        is_partial: some values were wrong by themselves and are absent.
    """
    problems: list[Problem] = []
    for rule in RULES:
        try:
            found = list(rule(config))
        except AttributeError:
            if not is_partial:
                raise
            continue
        for problem in found:
            value = in_words(config.value_of(problem.name))
            problems.append(problem.located(place_of(places, problem.name), value))
    return problems

"""Rules between parameters: one small function each, named for what it says; all are run, all findings told.

Every public function of the files in this folder is a rule; a file has those of one subject. A rule that
reads a value which is itself wrong is skipped: there is nothing to compare yet. Rules about the number of
devices are in `resolve.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from inspect import isfunction
from types import ModuleType

from neox_launcher.config.problems import Place, Problem, in_words, place_of
from neox_launcher.config.rules import (
    attention,
    blocks,
    compression,
    data,
    data_efficiency,
    elasticity,
    launch,
    model,
    optimizer,
    parallelism,
    precision,
    training,
    zero,
)
from neox_launcher.config.schema import NeoXConfig

__all__ = ["RULES", "broken_rules"]

Rule = Callable[[NeoXConfig], Iterator[Problem]]


def _rules_of(subject: ModuleType) -> Iterator[Rule]:
    for name, value in vars(subject).items():
        if isfunction(value) and value.__module__ == subject.__name__ and not name.startswith("_"):
            yield value


RULES: tuple[Rule, ...] = tuple(
    rule
    for subject in (
        attention,
        blocks,
        compression,
        data,
        data_efficiency,
        elasticity,
        launch,
        model,
        optimizer,
        parallelism,
        precision,
        training,
        zero,
    )
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

"""Answers of `neox-config explain`: the parameter of a name, those of a word, or those that a text finds."""

import difflib
import textwrap
from collections.abc import Iterable
from functools import cache

from neox_config.describe.reference import describe_parameter
from neox_config.describe.search import Hit, search
from neox_config.describe.words import SUBJECTS, subject_of
from neox_config.errors import ConfigError
from neox_config.problems import in_words
from neox_config.read.aliases import (
    COMPUTED,
    FOREIGN_NAMES,
    FOREIGN_REMEDIES,
    OLDER_SPELLINGS,
    RETIRED,
    SHORTHANDS,
)
from neox_config.read.features import feature_of, names_of_features
from neox_config.schema.config import all_parameters, parameter_named

__all__ = ["explain"]

_MOST_LISTED = 10
_LONGEST_NAME, _NEAR = 100, 0.75
_WIDEST_NAME = 46
_LONGEST_DOC = 110


def explain(text: str) -> str:
    """Return the answer to a name or words.

    Raises:
        ConfigError: Nothing was found; the message has the name of the most similar spelling, if any.
    """
    name = "_".join(text.strip().lstrip("-").replace("-", "_").split())
    name = _by_case().get(name.casefold(), name)
    answer = _about_name(name)
    if answer:
        subject = subject_of(name)
        named = subject.parameters if subject else ()
        others = [other for other in named if f"\n{other}\n" not in f"\n{answer}"]
        return answer + (f"\n\nSee also: {', '.join(others)}" if others else "")
    answer = _about_word(text) or _inside_blocks(name)
    if answer:
        return answer
    hits = search(text, every_word=True)
    known = _names_by_spelling()
    near = [] if hits else difflib.get_close_matches(name.casefold()[:_LONGEST_NAME], known, 1, _NEAR)
    hits = hits or ([] if near else search(text, every_word=False))
    if hits:
        return _listed(f"{in_words(text)} is not a parameter; these are about it:", hits)
    remedy = "try another word (all parameters: neox-config docs)"
    if near:
        remedy = f"did you mean {known[near[0]]}?"
    raise ConfigError(f"{in_words(text)} is not a parameter; {remedy}", code="unknown-parameter")


def _about_name(name: str) -> str | None:
    """Return the description of a parameter outside of blocks, of a dotted one, or of an alias."""
    if name in SHORTHANDS:
        return f"{name} stands for {SHORTHANDS[name]}\n\n{_described(SHORTHANDS[name])}"
    if name in OLDER_SPELLINGS and not _is_declared(name):
        older = OLDER_SPELLINGS[name]
        return f"{name} is an older spelling: {older.doc}\n\n{_described(older.targets[0])}"
    if name in FOREIGN_NAMES:
        return f"{name} is called {FOREIGN_NAMES[name]} here\n\n{_described(FOREIGN_NAMES[name])}"
    if name in FOREIGN_REMEDIES:
        return f"{name} is not a parameter: {FOREIGN_REMEDIES[name]}"
    if name in COMPUTED:
        return f"{name} is computed: {COMPUTED[name]}; a given value is ignored"
    if name in RETIRED:
        return f"{name} has no effect: it {RETIRED[name]}"
    if name in names_of_features():
        feature = feature_of(name)
        return f"{name} belongs to a feature that {feature.outcome}: {feature.title}; {feature.instead}"
    return _described(name) if _is_declared(name) else None


def _about_word(text: str) -> str | None:
    subject = subject_of(text)
    if subject is None:
        return None
    if not subject.parameters:
        return subject.sentence
    head = subject.sentence or f"{in_words(text)} is not a parameter; see:"
    if len(subject.parameters) == 1:
        return f"{head}\n\n{_described(subject.parameters[0])}"
    return _listed(head, map(_hit, subject.parameters))


def _inside_blocks(name: str) -> str | None:
    """Return the parameters with this name in blocks."""
    inside = [known.name for known in all_parameters() if known.name.endswith(f".{name}")]
    if len(inside) == 1:
        return _described(inside[0])
    return _listed(f"{name} is a parameter of several blocks:", map(_hit, inside)) if inside else None


def _described(name: str) -> str:
    return describe_parameter(parameter_named(name))


def _hit(name: str) -> Hit:
    return Hit(name, parameter_named(name).doc)


def _listed(head: str, hits: Iterable[Hit]) -> str:
    """Return the head and one line for each hit."""
    hits = list(hits)
    width = min(max(len(hit.name) for hit in hits[:_MOST_LISTED]), _WIDEST_NAME)
    lines = [
        f"  {hit.name:<{width}}  "
        + textwrap.shorten(hit.doc.partition(". ")[0], _LONGEST_DOC, placeholder=" ...")
        for hit in hits[:_MOST_LISTED]
    ]
    more = len(hits) - _MOST_LISTED
    if more > 0:
        lines.append(f"  and {more} more; add a word to narrow the search")
    return "\n".join([head, "", *lines, "", "neox-config explain NAME describes one of them."])


def _is_declared(name: str) -> bool:
    try:
        parameter_named(name)
    except KeyError:
        return False
    return True


@cache
def _by_case() -> dict[str, str]:
    """Return all names that have a direct answer, by themselves without case."""
    names = [parameter.name for parameter in all_parameters()]
    names += [*SHORTHANDS, *OLDER_SPELLINGS, *FOREIGN_NAMES, *FOREIGN_REMEDIES, *COMPUTED, *RETIRED]
    return {name.casefold(): name for name in [*names, *names_of_features()]}


@cache
def _names_by_spelling() -> dict[str, str]:
    """Return the names and words that are suggested for a misspelled one."""
    words = (word.strip().replace(" ", "_") for subject in SUBJECTS for word in subject.words.split(","))
    inside = {parameter.name.rpartition(".")[2]: parameter.name for parameter in all_parameters()}
    return {word: word for word in words} | inside | _by_case()

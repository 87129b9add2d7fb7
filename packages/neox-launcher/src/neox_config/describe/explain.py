"""Answers of `neox-config explain`: the parameter of a name, those of a word, or those that a text finds."""

import difflib
import textwrap
from collections.abc import Iterable
from functools import cache

from neox_config.describe.reference import describe_parameter
from neox_config.describe.search import Hit, search
from neox_config.errors import ConfigError
from neox_config.names import answer, answers
from neox_config.problems import in_words
from neox_config.read.aliases import accepted_names
from neox_config.read.older import OLDER_SPELLINGS
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
    found = _about_name(name) or _inside_blocks(name)
    if found:
        return found
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
    """Return the description of a parameter, or what a name from elsewhere means."""
    if _is_declared(name):
        return _described(name)
    if name in OLDER_SPELLINGS:
        older = OLDER_SPELLINGS[name]
        return f"{name} is an older spelling: {older.doc}\n\n{_described(older.targets[0])}"
    found = answer(name)
    if found is None:
        return None
    if not found.parameters:
        verb = "is not a parameter: " if found.kind == "foreign" else ""
        remedy = f"; {found.remedy}" if found.remedy else ""
        return f"{name} {verb}{found.sentence}{remedy}"
    if len(found.parameters) == 1:
        head = found.sentence or f"{name} is called {found.parameters[0]} here"
        return f"{head}\n\n{_described(found.parameters[0])}"
    return _listed(found.sentence or f"{name} is not a parameter; see:", map(_hit, found.parameters))


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
    """Return the names of parameters and those that files may have instead, by themselves without case."""
    names = (*(parameter.name for parameter in all_parameters()), *accepted_names())
    return {name.casefold(): name for name in names}


@cache
def _names_by_spelling() -> dict[str, str]:
    """Return the names and words that are suggested for a misspelled one."""
    words = (word.replace(" ", "_") for word in answers("foreign"))
    inside = {parameter.name.rpartition(".")[2]: parameter.name for parameter in all_parameters()}
    return {word: word for word in words} | inside | _by_case()

"""Full-text search over the names, documentation and choices of all parameters."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from neox_config.names import answers
from neox_config.schema.config import all_parameters
from neox_config.schema.parameter import Parameter

__all__ = ["Hit", "search"]

# Weight of a word by the text that contains it. A match of the beginning of a word counts half.
_OWN_NAME, _CHOICE, _BLOCK_NAME, _DOC = 8.0, 5.0, 3.0, 2.0
_SHORTEST_BEGINNING = 4
_MOST_WORDS = 20
# Words that say nothing about a parameter.
_COMMON = frozenset(
    "a an and are as at be by do for from how i in is it my not of on or set the to use what with".split()
)


@dataclass(frozen=True, slots=True)
class Hit:
    """A parameter that contains the words.

    Args:
        name: its name.
        doc: what it is.
    """

    name: str
    doc: str


def search(text: str, *, every_word: bool) -> list[Hit]:
    """Return what contains every word of a text, or any of them, by relevance."""
    words = [word for word in _words(text)[:_MOST_WORDS] if word not in _COMMON]
    holds = all if every_word else any
    found = [(hit, [_relevance(word, weights) for word in words]) for hit, weights in _index()]
    ranked = sorted((row for row in found if row[1] and holds(row[1])), key=lambda row: -sum(row[1]))
    return [hit for hit, _ in ranked]


def _relevance(word: str, weights: dict[str, float]) -> float:
    """Return the weight of a word, or half of that of the heaviest word that begins with it."""
    if word in weights:
        return weights[word]
    if len(word) < _SHORTEST_BEGINNING:
        return 0.0
    return max((weight / 2 for known, weight in weights.items() if known.startswith(word)), default=0.0)


@cache
def _index() -> Sequence[tuple[Hit, dict[str, float]]]:
    return [(Hit(each.name, each.doc), _weights(each)) for each in all_parameters()]


def _weights(parameter: Parameter) -> dict[str, float]:
    block, _, own = parameter.name.rpartition(".")
    others = [name for name, found in answers("shorthands").items() if found.parameters == (parameter.name,)]
    return _heaviest(
        [
            (own, _OWN_NAME),
            (block, _BLOCK_NAME),
            *((choice, _CHOICE) for choice in parameter.choices),
            *((other, _CHOICE) for other in others),
            (f"{parameter.doc} {parameter.none_means or ''} {parameter.used_when or ''}", _DOC),
        ]
    )


def _heaviest(texts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return each word with the largest weight of the texts that contain it."""
    weights: dict[str, float] = {}
    for text, weight in texts:
        for word in _words(text):
            weights[word] = max(weights.get(word, 0.0), weight)
    return weights


def _words(text: str) -> list[str]:
    """Return the words of a text without case and a final s."""
    found = re.findall(r"[^\W_]+", text.casefold())
    return [word.removesuffix("s") if len(word) > 3 else word for word in found]

"""What names from elsewhere mean here: those of GPT-NeoX, Megatron-LM, DeepSpeed and Hugging Face, and words.

The answers are the rows of `names.yml`, which is read when the first name is not a parameter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

__all__ = ["Answer", "Where", "answer", "answers"]

Where = Literal["file", "value", "option", "command"]
_SENTENCES = {
    "computed": "is computed: {}; the given value is not used",
    "retired": "has no effect: it {}",
    "features": "is not supported: it requires {}",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a name means.

    Args:
        kind: the section of `names.yml`.
        parameters: parameters that it means, the likeliest first.
        sentence: what it is, or what to do instead.
        remedy: what to do instead of a feature.
        off: the value that leaves a feature off; of a value, its spelling here.
    """

    kind: str
    parameters: tuple[str, ...] = ()
    sentence: str = ""
    remedy: str = ""
    off: Any = None


def answer(name: str, where: Where = "file", value: Any = None) -> Answer | None:
    """Return what a name means, or None if it is not known.

    Args:
        name: the name, with underscores, and dotted in a block; of a value, its parameter.
        where: where it is met: a file or `neox-config explain`, a value of a parameter, an option of a
            command, or a word in place of a command.
        value: the value.
    """
    if where == "value":
        return _answers("values").get(f"{name}={str(value).lower()}")
    found = _answers(f"{where}s").get(name) if where != "file" else None
    if found is not None or where == "command":
        return found
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        found = _in_files().get(".".join(parts[:count]))
        if found is not None and found.parameters:
            return Answer(found.kind, (".".join((*found.parameters, *parts[count:])),))
        if found is not None:
            return found
    return _words().get(_without_spelling(parts[0]))


def answers(*sections: str) -> Mapping[str, Answer]:
    """Return the answers to all names in sections of `names.yml`, such as `features`."""
    return {name: found for section in sections for name, found in _answers(section).items()}


@cache
def _sections() -> Mapping[str, Any]:
    text = Path(__file__).with_suffix(".yml").read_text(encoding="utf-8")
    # The loader in C takes a tenth of the time, and is not in every build of PyYAML.
    found: Mapping[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return found


@cache
def _answers(section: str) -> Mapping[str, Answer]:
    rows = _sections()[section]
    if section == "values":
        ours = {
            f"{name}={theirs}": Answer(section, (name,), off=ours)
            for name, spellings in rows.items()
            for theirs, ours in spellings.items()
        }
        return ours | _features("values")
    if section == "features":
        return _features("names")
    return {name: _row(section, row) for names, row in rows.items() for name in names.split(", ")}


def _features(part: Literal["names", "values"]) -> dict[str, Answer]:
    """Return the answers about features by name, or by parameter and value."""
    found = {}
    for title, row in _sections()["features"].items():
        sentence, remedy = _SENTENCES["features"].format(title), row.get("instead", "remove it")
        for name, given in row.get(part, {}).items():
            for key in [name] if part == "names" else [f"{name}={value}" for value in given]:
                found[key] = Answer("features", sentence=sentence, remedy=remedy, off=given)
    return found


def _row(section: str, row: str | list[str]) -> Answer:
    """Return the answer of a row: parameters, a sentence, or both."""
    texts = [row] if isinstance(row, str) else row
    if section in _SENTENCES:
        return Answer(section, sentence=_SENTENCES[section].format(row))
    parameters = tuple(text for text in texts if " " not in text)
    return Answer(section, parameters, " ".join(text for text in texts if " " in text))


@cache
def _in_files() -> Mapping[str, Answer]:
    return answers("shorthands", "computed", "retired", "features")


@cache
def _words() -> Mapping[str, Answer]:
    return {_without_spelling(word): found for word, found in _answers("foreign").items()}


def _without_spelling(word: str) -> str:
    """Return a word without case, spaces, punctuation and a final s."""
    letters = "".join(char for char in word.casefold() if char.isalnum())
    return letters.removesuffix("s") if len(letters) > 3 else letters

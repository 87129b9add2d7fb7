"""What differs between two models, in words; models are compared in their simplest form."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from neox_config.problems import in_words
from neox_config.spec.model import Attention, Layer, ModelSpec, Pattern
from neox_config.spec.values import ABSENT, Each, changes, flat, parameters_of

__all__ = ["Difference", "attention_of", "differences", "patterns", "simplest"]


@dataclass(frozen=True, slots=True)
class Difference:
    """An option in which two models differ.

    Args:
        option: our parameter; if a value follows from several, or is the opposite of one, what it is called,
            with the parameters.
        value: its value, in words.
        theirs: the value of the other model, in words.
    """

    option: str
    value: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.option}: {self.value} (there: {self.theirs})"


def simplest(spec: ModelSpec) -> ModelSpec:
    """Return the same model, whose vocabulary is not padded, without windows that cover every sequence."""
    layers = tuple(_simplest(layer, spec.max_positions) for layer in spec.layers)
    return replace(spec, layers=layers, embedding=replace(spec.embedding, multiple=1))


def _simplest(layer: Layer, length: int) -> Layer:
    mixer = layer.mixer
    if not isinstance(mixer, Attention) or mixer.pattern is None or mixer.pattern_within(length) is not None:
        return layer
    return replace(layer, mixer=replace(mixer, kind="global", pattern=None))


def patterns(spec: ModelSpec) -> list[Pattern | None]:
    """Return the pattern of each layer; None if a token sees all earlier ones."""
    return [getattr(layer.mixer, "pattern", None) for layer in simplest(spec).layers]


def attention_of(layer: Layer) -> Attention:
    """Return the attention of a layer of a model that can be converted."""
    assert isinstance(layer.mixer, Attention), layer.mixer
    return layer.mixer


def differences(ours: ModelSpec, theirs: ModelSpec) -> list[Difference]:
    """Return the options in which two models differ."""
    one, other = simplest(ours), simplest(theirs)
    values, found = (flat(one), flat(other)), dict[str, tuple[list[str], list[str]]]()
    for path in changes(one, other):
        pair = found.setdefault(_option(path), ([], []))
        # Of an option of several parts, the first with a value counts, such as where positions are added.
        if "none" in map(_joined, pair):
            for words, each in zip(pair, values, strict=True):
                words += _in_words(each, path)
    return [Difference(option, *map(_joined, pair)) for option, pair in found.items()]


def _option(path: str) -> str:
    names = [name.replace("_", "-") for name in parameters_of(ModelSpec, path)]
    what = path.rpartition(".")[2].replace("_", "-")
    alike = [name for name in names if name.endswith(what)] or names
    is_same = len(alike) == 1 and not alike[0].startswith("no-")
    return alike[0] if is_same else f"{what} ({', '.join(names)})"


def _in_words(values: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the different values of a path; of a value of some class, its kind or the name of the class."""
    found, kinds = (_each(values.get(name, ABSENT)) for name in (path, f"{path}.kind"))
    for index, value in enumerate(found):
        kind = kinds[index % len(kinds)]
        yield _word(value if kind is ABSENT else kind)


def _each(value: Any) -> tuple[Any, ...]:
    return value.values if isinstance(value, Each) else (value,)


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        words = (" ".join(map(_word, each)) if isinstance(each, tuple) else _word(each) for each in value)
        return ", ".join(words) or "none"
    return "none" if value in (None, ABSENT) else in_words(value).lower()


def _joined(words: list[str]) -> str:
    """Return the words, each once, without "none" if there are others."""
    return ", ".join(dict.fromkeys(word for word in words if word != "none")) or "none"

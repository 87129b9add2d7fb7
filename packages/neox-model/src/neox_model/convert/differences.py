"""What differs between two models, in words; models are compared in their simplest form."""

from dataclasses import replace
from itertools import cycle
from typing import Any

from neox_config.problems import in_words
from neox_config.spec.model import Attention, Layer, Mixer, ModelSpec
from neox_config.spec.values import ABSENT, Each, changes, flat, parameters_of

__all__ = ["attention_of", "differences", "mixers", "simplest"]


def simplest(spec: ModelSpec) -> ModelSpec:
    """Return the same model, whose vocabulary is not padded, without windows that cover every sequence."""
    layers = []
    for layer in spec.layers:
        mixer = layer.mixer
        if (
            isinstance(mixer, Attention)
            and mixer.pattern
            and mixer.pattern_within(spec.max_positions) is None
        ):
            layer = replace(layer, mixer=replace(mixer, kind="global", pattern=None))
        layers.append(layer)
    return replace(spec, layers=tuple(layers), embedding=replace(spec.embedding, multiple=1))


def mixers(spec: ModelSpec) -> list[Mixer]:
    """Return the mixer of each layer in its simplest form."""
    return [layer.mixer for layer in simplest(spec).layers]


def attention_of(layer: Layer) -> Attention:
    """Return the attention of a layer of a model that can be converted."""
    assert isinstance(layer.mixer, Attention), layer.mixer
    return layer.mixer


def differences(ours: ModelSpec, theirs: ModelSpec) -> list[str]:
    """Return the options in which two models differ, with both values, in words.

    An option is our parameter; if a value follows from several, or is the opposite of one, it is what the
    value is called, with the parameters.
    """
    one, other = simplest(ours), simplest(theirs)
    values, found = (flat(one), flat(other)), dict[str, tuple[list[str], list[str]]]()
    for path in changes(one, other):
        names = [name.replace("_", "-") for name in parameters_of(ModelSpec, path)]
        what = path.rpartition(".")[2].replace("_", "-")
        alike = [name for name in names if name.endswith(what)] or names
        is_same = len(alike) == 1 and not alike[0].startswith("no-")
        option = alike[0] if is_same else f"{what} ({', '.join(names)})"
        pair = found.setdefault(option, ([], []))
        # Of an option of several parts, the first with a value counts, such as where positions are added.
        if "none" in map(_joined, pair):
            for words, each in zip(pair, values, strict=True):
                found_values, kinds = (
                    value.values if isinstance(value, Each) else (value,)
                    for value in (each.get(path, ABSENT), each.get(f"{path}.kind", ABSENT))
                )
                # Of a value of some class, its kind or the name of the class.
                named = zip(found_values, cycle(kinds), strict=False)
                words += [_word(value if kind is ABSENT else kind) for value, kind in named]
    return [f"{option}: {_joined(one)} (there: {_joined(other)})" for option, (one, other) in found.items()]


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        words = (" ".join(map(_word, each)) if isinstance(each, tuple) else _word(each) for each in value)
        return ", ".join(words) or "none"
    return "none" if value in (None, ABSENT) else in_words(value).lower()


def _joined(words: list[str]) -> str:
    """Return the words, each once, without "none" if there are others."""
    return ", ".join(dict.fromkeys(word for word in words if word != "none")) or "none"

"""Fold names from elsewhere into parameters: shorthands, older spellings, and names without effect."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.facts.checkpoints import checkpoint_name
from neox_config.names import Answer, answer, answers
from neox_config.problems import Problem, as_block, in_words
from neox_config.read.older import EXTRA_BLOCK, OLDER_SPELLINGS
from neox_config.read.reading import Leaf
from neox_config.schema.config import field_named
from neox_config.schema.parameter import choices_of

__all__ = [
    "Unfolded",
    "accepted_names",
    "fold_aliases",
    "shorthand_of",
]

# Names for which null and "dynamic" mean dynamic loss scaling, like 0.
_LOSS_SCALES = ("loss_scale", "fp16.loss_scale", "amp.loss_scale")


@dataclass(frozen=True, slots=True)
class Unfolded:
    """Result of folding all names.

    Args:
        leaves: values under the names of their parameters.
        problems: errors in names and values from elsewhere.
        missing: features that are requested and not supported; their values are not in `leaves`.
        notices: notes about names without effect.
    """

    leaves: list[Leaf] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)
    notices: list[Problem] = field(default_factory=list)


def accepted_names() -> list[str]:
    """Return the names that files may have in place of those of parameters."""
    return [*answers("shorthands", "computed", "retired", "features"), *OLDER_SPELLINGS]


def _answer(name: str) -> Answer | None:
    return None if field_named(name) is not None else answer(name)


def shorthand_of(name: str) -> str | None:
    """Return the parameter or block that a shorthand stands for, or None for other names."""
    outer, _, inner = name.partition(".")
    if outer == EXTRA_BLOCK and inner:
        return shorthand_of(inner) or inner
    found = _answer(name)
    return found.parameters[0] if found is not None and found.kind == "shorthands" else None


def _note_without_effect(leaf: Leaf, given: Mapping[str, Any]) -> Problem | None:
    """Return the note for a name whose value is not used; None for other names.

    Args:
        leaf: one value.
        given: all values by name.
    """
    found = _answer(leaf.name)
    if found is not None and found.kind in ("computed", "retired"):
        return _note(leaf, found.sentence)
    if found is not None and found.kind == "features" and _is_off(leaf, found.off, given):
        return _note(leaf, "has no effect: it is off, and other values are not supported")
    return None


def fold_aliases(leaves: Sequence[Leaf]) -> Unfolded:
    """Replace names from elsewhere by those of parameters, and collect errors and notes."""
    leaves = [
        replace(leaf, path=leaf.path[1:]) if leaf.path[0] == EXTRA_BLOCK and len(leaf.path) > 1 else leaf
        for leaf in leaves
    ]
    given = {leaf.name: leaf.value for leaf in leaves}
    result = Unfolded()
    replaced: set[str] = set()
    requested: dict[str, tuple[Answer, list[Leaf]]] = {}
    for leaf in leaves:
        if leaf.name in OLDER_SPELLINGS:
            replaced.update(_translate(leaf, given, result))
        elif leaf.name == "iteration" and leaf.value:
            what = "chooses the checkpoint that GPT-NeoX loads; here, load may name one checkpoint"
            remedy = f"remove it, and set load: CHECKPOINTS/{checkpoint_name(leaf.value)}"
            result.problems.append(replace(_note(leaf, what), remedy=remedy))
        elif (unused := _note_without_effect(leaf, given)) is not None:
            result.notices.append(unused)
        elif (feature := _feature(leaf)) is not None:
            requested.setdefault(feature.sentence, (feature, []))[1].append(leaf)
        else:
            result.leaves.append(_own_name(leaf))
    result.missing.extend(_refusal(feature, found) for feature, found in requested.values())
    # fp16.type replaces fp16.enabled by bf16.enabled, so the given fp16.enabled is dropped.
    if "fp16.enabled" in replaced:
        result.leaves[:] = [
            leaf for leaf in result.leaves if leaf.name != "fp16.enabled" or leaf.value is False
        ]
    return result


def _translate(leaf: Leaf, given: Mapping[str, Any], result: Unfolded) -> Mapping[str, Any]:
    older = OLDER_SPELLINGS[leaf.name]
    try:
        found = older.translate(leaf.value, given)
    except ValueError as error:
        target = older.targets[0]
        remedy = f"write {as_block(target) if '.' in target else target} instead"
        result.problems.append(replace(_note(leaf, str(error)), remedy=remedy))
        return {}
    for name, value in found.items():
        result.leaves.append(Leaf(tuple(name.split(".")), value, leaf.place))
    return found


def _feature(leaf: Leaf) -> Answer | None:
    """Return the feature that is not supported and that a name or a value requests."""
    found = [_answer(leaf.name), *(_value_from_elsewhere(leaf.name, text) for text in _texts(leaf.value))]
    return next((each for each in found if each is not None and each.kind == "features"), None)


def _is_off(leaf: Leaf, off: Any, given: Mapping[str, Any]) -> bool:
    """Return True for the value that leaves a feature off, and for a block with `enabled: false`."""
    if len(leaf.path) > 1:
        return given.get(f"{leaf.path[0]}.enabled") is False
    value = leaf.value.lower() if isinstance(leaf.value, str) else leaf.value
    return value in (None, [], {}) or bool(value == off)


def _refusal(feature: Answer, leaves: Sequence[Leaf]) -> Problem:
    """Return the problem of a feature, at the first of the names that request it."""
    first, *others = leaves
    also = ", ".join(dict.fromkeys(leaf.place.spelling or leaf.name for leaf in others))
    remedy = f"{feature.remedy}; the same applies to {also}" if also else feature.remedy
    return replace(_note(first, feature.sentence), remedy=remedy)


def _own_name(leaf: Leaf) -> Leaf:
    """Return the leaf under the name of its parameter."""
    target = shorthand_of(leaf.name)
    leaf = leaf if target is None else replace(leaf, path=tuple(target.split(".")))
    if leaf.value is None and leaf.name in _LOSS_SCALES:
        return replace(leaf, value=0.0)
    return replace(leaf, value=_usual_value(leaf.name, leaf.value))


def _usual_value(name: str, value: Any) -> Any:
    """Return a value of a parameter with other spellings of its choices replaced."""
    if isinstance(value, list) and name == "attention_config":
        return [_usual_value(name, item) for item in value]
    if isinstance(value, str) and value.lower() == "dynamic" and name in _LOSS_SCALES:
        return 0
    found = _value_from_elsewhere(name, value) if isinstance(value, str) else None
    return value if found is None or found.kind == "features" else found.off


def _value_from_elsewhere(name: str, value: str) -> Answer | None:
    """Return what a text means that is not one of the choices of its parameter."""
    declared = field_named(name)
    if declared is None:
        return None
    choices = ATTENTION_FACTS if name == "attention_config" else choices_of(declared)
    is_known = not choices or value.lower() in (choice.lower() for choice in choices)
    return None if is_known else answer(name, "value", value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _note(leaf: Leaf, what: str) -> Problem:
    return Problem(leaf.name, what, value=in_words(leaf.value), place=leaf.place)

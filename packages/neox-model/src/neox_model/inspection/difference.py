"""Compare two checkpoints by logical names, whatever layouts wrote them."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import inf
from os.path import commonprefix
from pathlib import Path
from typing import Any

from neox_config.facts.checkpoints import MANIFEST
from neox_config.pluralize import pluralize
from neox_config.problems import in_words
from neox_config.spec.resume import IN_EFFECT, SAMPLES_PER_ITERATION, Changes
from neox_model.checkpoint.comparison import DOCUMENTS, SAMPLES_DIGEST, changes_since
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.errors import DamagedCheckpointError, quoted
from neox_model.checkpoint.names import in_model_order, is_random_state, is_weight
from neox_model.verify.tensors import State
from neox_model.verify.ulps import distance_of

__all__ = ["Comparison", "TensorComparison", "compare", "lines"]

_DERIVED = {IN_EFFECT, SAMPLES_PER_ITERATION, SAMPLES_DIGEST, DOCUMENTS}
# Tensors that are listed without --all.
_WORST = 10
# Characters that are shown before the first difference of two long values.
_CONTEXT = 12
_KINDS = ("weights", "optimizer states", "random states")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorComparison:
    """One logical tensor in two checkpoints.

    Args:
        name: its name.
        kind: weights, optimizer states or random states.
        numel: number of elements.
        differing: number of elements that differ.
        ulps: largest difference in units of the last place.
        relative_norm: 2-norm of the difference, relative to the larger 2-norm of the two.
        dtypes: the stored dtypes (A, B).
        reason: why it cannot be compared, such as "only in A"; empty if it was.
    """

    name: str
    kind: str
    numel: int = 0
    differing: int = 0
    ulps: float = 0.0
    relative_norm: float = 0.0
    dtypes: tuple[str, str] = ("", "")
    reason: str = ""

    @property
    def is_equal(self) -> bool:
        """Return whether all elements are equal, and stored in the same dtype."""
        return not self.reason and not self.differing and not self.has_two_dtypes

    @property
    def has_two_dtypes(self) -> bool:
        """Return whether the stored dtypes differ."""
        return self.dtypes[0] != self.dtypes[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The differences between the checkpoints A and B; each value is a pair (A, B).

    Args:
        tensors: every tensor that is in one of them, in the order of the model.
        counters: counters, optimizer and schedule that differ.
        model: parameters of the model that differ.
        training: parameters of training that differ.
        free: other parameters that differ; they change neither the model nor training.
        layout: sizes of the parallel groups that differ.
        packages: versions that differ.
        not_compared: what was not compared, with the reason.
    """

    tensors: tuple[TensorComparison, ...]
    counters: Mapping[str, tuple[Any, Any]]
    model: Mapping[str, tuple[Any, Any]]
    training: Mapping[str, tuple[Any, Any]]
    free: Mapping[str, tuple[Any, Any]]
    layout: Mapping[str, tuple[Any, Any]]
    packages: Mapping[str, tuple[Any, Any]]
    not_compared: Mapping[str, str]

    @property
    def is_equal(self) -> bool:
        """Return whether the states are equal: tensors, counters, and parameters of model and training."""
        tensors_are_equal = all(tensor.is_equal for tensor in self.tensors)
        return tensors_are_equal and not (self.counters or self.model or self.training)

    @property
    def verdict(self) -> str:
        """Return the result in words."""
        if not self.is_equal:
            return "different"
        return "equal, as far as compared" if self.not_compared else "equal"

    @property
    def differing(self) -> list[TensorComparison]:
        """The tensors that differ, those that cannot be compared and the largest differences first.

        Random states come last: their numbers have no size.
        """

        def key(tensor: TensorComparison) -> tuple[bool, float]:
            return tensor.kind == _KINDS[2], -inf if tensor.reason else -tensor.relative_norm

        return sorted((tensor for tensor in self.tensors if not tensor.is_equal), key=key)

    def plain(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return {"is_equal": self.is_equal, **asdict(self)}


def compare(one: Path, other: Path) -> Comparison:
    """Compare two checkpoints, reading a part of one tensor at a time.

    Raises:
        CheckpointError: one of them is damaged.
    """
    a, b = State(one), State(other)
    for state in (a, b):
        try:
            changes_since(state.manifest, state.manifest.config)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{state.folder / MANIFEST}: {error}") from error
    same_layout = a.manifest.layout == b.manifest.layout
    # Values in effect can be computed for one of them only.
    is_reversed = IN_EFFECT not in b.manifest.config
    changes = Changes(unknown="neither checkpoint records its values in effect")
    if IN_EFFECT in {*a.manifest.config, *b.manifest.config}:
        since, other_side = (b, a) if is_reversed else (a, b)
        changes = changes_since(since.manifest, other_side.manifest.config)
    skipped = {} if same_layout else {"random states": "the layouts differ, so each rank has another stream"}
    if changes.unknown is not None:
        skipped |= dict.fromkeys(("model", "training"), changes.unknown)
    names = in_model_order(a.manifest.tensors.keys() | b.manifest.tensors.keys())
    model, training = (
        {each.label: (each.here, each.there) if is_reversed else (each.there, each.here) for each in changed}
        for changed in (changes.model, changes.training)
    )
    recorded = _pairs(dict(_leaves(a.manifest.config)), dict(_leaves(b.manifest.config)))
    return Comparison(
        tensors=tuple(_compared(name, a, b) for name in names if same_layout or not is_random_state(name)),
        counters=dict(_counters(a.manifest, b.manifest)),
        model=model,
        training=training,
        # Without those that belong to a known difference.
        free={name: pair for name, pair in recorded.items() if name not in {*model, *training}},
        layout=_pairs(asdict(a.manifest.layout), asdict(b.manifest.layout)),
        packages=_pairs(a.manifest.packages, b.manifest.packages),
        not_compared=skipped,
    )


def _kind(name: str) -> str:
    weights, states, random = _KINDS
    return weights if is_weight(name) else random if is_random_state(name) else states


def _compared(name: str, a: State, b: State) -> TensorComparison:
    one, other = a.manifest.tensors.get(name), b.manifest.tensors.get(name)
    if one is None or other is None:
        return TensorComparison(name=name, kind=_kind(name), reason=f"only in {'B' if one is None else 'A'}")
    if one.shape != other.shape:
        reason = f"shape {list(one.shape)} in A, {list(other.shape)} in B"
        return TensorComparison(name=name, kind=_kind(name), reason=reason)
    distance = distance_of(zip(a.chunks(name), b.chunks(name), strict=True))
    return TensorComparison(
        name=name,
        kind=_kind(name),
        numel=distance.numel,
        differing=distance.differing,
        ulps=distance.ulps,
        relative_norm=distance.relative_norm,
        dtypes=(one.dtype, other.dtype),
    )


def _counters(a: Manifest, b: Manifest) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield what differs outside of tensors and parameters; engines may record different counters."""
    if a.iteration != b.iteration:
        yield "iteration", (a.iteration, b.iteration)
    if a.optimizer != b.optimizer:
        yield "optimizer", (a.optimizer, b.optimizer)
    if a.training.get("samples") == b.training.get("samples"):
        digests = [each.config.get(SAMPLES_DIGEST, {}) for each in (a, b)]
        for part, values in _pairs(*digests).items():
            if None not in values:
                yield f"data order of {part}", values
    parts = (("training", a.training, b.training), ("engine", a.engine, b.engine))
    for part, one, other in (*parts, ("schedule", a.schedule, b.schedule)):
        for name, values in _pairs(dict(_leaves(one)), dict(_leaves(other))).items():
            if part != "engine" or None not in values:
                yield f"{part}.{name}", values
    # The first difference of each single-number optimizer state, with the number of weights.
    found: dict[str, list[tuple[Any, Any]]] = {}
    for name in in_model_order(a.weight_names & b.weight_names) if a.optimizer and b.optimizer else ():
        states = [each.optimizer_scalars.get(name, {}) for each in (a, b)]
        numbers = [{key: state["value"] for key, state in each.items()} for each in states]
        for key, values in _pairs(*numbers).items():
            found.setdefault(key, []).append(values)
    for key, pairs in found.items():
        yield f"optimizer state {key} (weights: {len(pairs):,})", pairs[0]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the parameters inside of blocks, by dotted name, without derived values."""
    for name, value in values.items():
        if prefix + name in _DERIVED:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ, by name."""
    found = {name: (one.get(name), other.get(name)) for name in sorted(one.keys() | other.keys())}
    # NaN is equal to NaN.
    return {name: (a, b) for name, (a, b) in found.items() if not (a == b or (a != a and b != b))}


def lines(found: Comparison, *, all_tensors: bool) -> Iterator[str]:
    """Yield the text of a comparison: the summary, then the tensors with the largest differences."""
    for kind in _KINDS:
        of_kind = [tensor for tensor in found.tensors if tensor.kind == kind]
        yield f"  {kind:18}{_of_tensors(of_kind, found.not_compared.get(kind))}"
    sections = {
        "counters": found.counters,
        "model": found.model,
        "training": found.training,
        "other parameters": found.free,
        "layout": found.layout,
        "packages": found.packages,
    }
    for label, values in sections.items():
        if label in found.not_compared:
            yield f"  {label:18}not compared: {quoted(found.not_compared[label])}"
        else:
            yield from _table(label, values)
    shown = list(found.tensors) if all_tensors else found.differing[:_WORST]
    if shown:
        yield ""
        yield "all tensors:" if all_tensors else "tensors with the largest differences:"
        yield from map(_tensor_line, shown)
        left = len(found.differing) - len(shown)
        if left > 0:
            yield f"  and {left:,} more; --all lists every tensor"


def _of_tensors(tensors: list[TensorComparison], skipped: str | None) -> str:
    if skipped is not None:
        return f"not compared: {skipped}"
    differing = [tensor for tensor in tensors if not tensor.is_equal]
    if not differing:
        return f"equal ({pluralize(len(tensors), 'tensor')})" if tensors else "none"
    compared = [tensor for tensor in differing if not tensor.reason]
    text = f"{len(differing):,} of {len(tensors):,} tensors differ"
    if compared:
        text += (
            f", by at most {max(tensor.ulps for tensor in compared):,.0f} ulp, relative norm at most "
            f"{max(tensor.relative_norm for tensor in compared):.2e}"
        )
    return text


def _table(label: str, values: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    for name, pair in values.items():
        texts = [in_words(value) for value in pair]
        if texts[0] == texts[1]:
            # Of long values that begin alike, the part around the first difference.
            texts = [repr(value) for value in pair]
            start = max(0, len(commonprefix(texts)) - _CONTEXT)  # noqa: RUF071
            texts = [f"...{text[start:]}" for text in texts]
        one, other = map(quoted, texts)
        yield f"  {label:18}{quoted(name)}: {one} in A, {other} in B"
    if not values:
        yield f"  {label:18}equal"


def _tensor_line(tensor: TensorComparison) -> str:
    if tensor.reason:
        text = tensor.reason
    elif tensor.is_equal:
        text = "equal"
    else:
        text = (
            f"{tensor.differing:,} of {tensor.numel:,} elements differ, by at most {tensor.ulps:,.0f} ulp, "
            f"relative norm {tensor.relative_norm:.2e}"
        )
    if tensor.has_two_dtypes:
        text += f"; stored as {tensor.dtypes[0]} in A, {tensor.dtypes[1]} in B"
    return f"  {quoted(tensor.name)}: {text}"

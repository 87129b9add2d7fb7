"""What the differences between a layout and one process mean.

The first kind of value that differs is explained; later ones follow from the reference's values, so that they
differ for another reason. Explanations are hypotheses that are tried on the values: what each micro-batch
adds to the reference's gradient, the parts of other ranks, and sums over ranks.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from neox_config.pluralize import pluralize
from neox_launcher.protocol.layout_verification import Finding, LayoutAnswer, Part
from neox_model.verify_layout.observer import Values
from neox_model.verify_layout.rows import KINDS, Limit, Piece, Place, Row

__all__ = ["Sizes", "answer_of"]

_MOST_FINDINGS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The layout.

    Args:
        data: data-parallel size.
        tensor: tensor-parallel size.
        stages: pipeline stages.
        accumulation: micro-batches per update and replica.
    """

    data: int
    tensor: int
    stages: int
    accumulation: int

    def of(self, axis: str) -> int:
        """Return the size of the group along an axis of a Place."""
        return {"data": self.data, "tensor": self.tensor, "stage": self.stages}[axis]


# Axis of a Place -> the group of ranks along it.
_GROUPS = {"tensor": "tensor-parallel", "data": "data-parallel", "stage": "pipeline"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """All differing pieces of one tensor, and how to look at them: of a weight, what an update changed."""

    name: str
    pieces: Sequence[Piece]
    values: Values
    sizes: Sizes
    limit: Limit

    @property
    def kind(self) -> str:
        return self.pieces[0].row.kind

    @property
    def step(self) -> int:
        return self.pieces[0].row.step

    @property
    def before(self) -> Tensor | None:
        """A weight before the update; None of other kinds."""
        return self.values.weight_before(self.step, self.name) if self.kind == "weights" else None

    @property
    def whole(self) -> Tensor:
        """The reference's values."""
        found, before = self.values.get(self.kind, self.step, self.name), self.before
        assert found is not None, "it was compared"
        return found if before is None else found.double() - before.double()

    def agrees(self, found: Tensor, expected: Tensor) -> bool:
        """Return True if values agree up to rounding."""
        scale = max(float(expected.norm()), 1e-300)
        return float((found - expected).norm()) <= max(self.limit.error, 1e-8) * scale


def answer_of(
    rows: Sequence[Row],
    pieces: Sequence[Piece],
    missing: Sequence[tuple[str, str]],
    values: Values,
    sizes: Sizes,
    *,
    limit: Limit,
) -> LayoutAnswer:
    """Summarize what all ranks compared.

    Args:
        rows: all comparisons.
        pieces: what differs first on each rank.
        missing: kind and name of what the reference has not.
        values: what the reference computed.
        sizes: the layout.
        limit: what is rounding.
    """
    findings = [
        Finding(
            what=f"{kind}: {name}", meaning="one process has no such tensor: its name depends on the layout"
        )
        for kind, name in sorted(set(missing))[:_MOST_FINDINGS]
    ]
    findings += _lacking(rows, values)
    wrong = sorted((row for row in rows if row.differs(limit)), key=lambda row: row.order)
    if wrong:
        first = wrong[0].order
        mine = [piece for piece in pieces if piece.row.order == first]
        findings += _explained(mine, [row for row in rows if row.order == first], values, sizes, limit)
    return LayoutAnswer(parts=tuple(_parts(rows, limit)), findings=tuple(findings[:_MOST_FINDINGS]))


def _lacking(rows: Sequence[Row], values: Values) -> list[Finding]:
    """Return what the reference has, and no rank of the layout."""
    found = {f"{row.kind}/{row.step}/{row.name}" for row in rows}
    lacks = [name for name in values.tensors if name.split("/")[0] in KINDS[1:] and name not in found]
    return [
        Finding(what=name, meaning="no rank of the layout has it: it was left out there") for name in lacks
    ]


def _parts(rows: Sequence[Row], limit: Limit) -> Iterator[Part]:
    for kind in KINDS:
        found = [row for row in rows if row.kind == kind]
        if found:
            yield Part(
                name=kind,
                compared=len(found),
                differing=sum(row.differs(limit) for row in found),
                worst=min(max(row.error for row in found), sys.float_info.max),
                limit=limit.error,
            )


def _explained(
    pieces: Sequence[Piece], rows: Sequence[Row], values: Values, sizes: Sizes, limit: Limit
) -> list[Finding]:
    """Return one finding for all tensors that differ in the same way."""
    by_name: dict[str, list[Piece]] = defaultdict(list)
    for piece in sorted(pieces, key=lambda each: each.row.place.rank):
        by_name[piece.row.name].append(piece)
    cases = [
        _Case(name=name, pieces=found, values=values, sizes=sizes, limit=limit)
        for name, found in by_name.items()
    ]
    by_meaning: dict[tuple[str, str], list[_Case]] = defaultdict(list)
    for case in cases:
        by_meaning[case.kind, _signature(case)].append(case)
    found = []
    for (kind, signature), same in by_meaning.items():
        alike = [row for row in rows if row.kind == kind]
        found.append(Finding(what=_what(same, alike), meaning=_meaning(signature, same, alike)))
    return sorted(found, key=lambda finding: finding.meaning.startswith(_UNKNOWN))


_UNKNOWN = "unlike any known fault"
_NUMBER, _FACTOR, _OWN_FACTORS = "number", "factor", "each rank's shard is scaled by another factor"


def _signature(case: _Case) -> str:
    """Return how the pieces of a tensor differ."""
    return next(filter(None, (hypothesis(case) for hypothesis in _HYPOTHESES)), _UNKNOWN)


def _not_finite(case: _Case) -> str | None:
    if all(piece.values.isfinite().all() for piece in case.pieces):
        return None
    return "values are not finite"


def _number_of_ranks(case: _Case) -> str | None:
    """A loss, or a norm, which has no direction."""
    return _NUMBER if not case.whole.dim() else None


def _factor(case: _Case) -> str | None:
    """Every piece is the expected one, times a number."""
    factors = []
    for piece in case.pieces:
        expected = piece.of(case.whole)
        norm = float(expected @ expected)
        factor = float(piece.values @ expected) / norm if norm else 0.0
        if not norm or not factor or not case.agrees(piece.values, factor * expected):
            return None
        factors.append(factor)
    is_one = max(factors) - min(factors) <= 1e-4 * abs(factors[0])
    return f"{_FACTOR} {_number(factors[0])}" if is_one else _OWN_FACTORS


def _zero(case: _Case) -> str | None:
    if any(piece.values.any() for piece in case.pieces):
        return None
    return (
        "not updated: the values are those before the update"
        if case.kind == "weights"
        else "the values are 0"
    )


def _decay(case: _Case) -> str | None:
    """What an update changed differs by a multiple of the weights."""
    before = case.before
    if before is None:
        return None
    for piece in case.pieces:
        weights, rest = piece.of(before), piece.values - piece.of(case.whole)
        multiple = float(rest @ weights) / max(float(weights @ weights), 1e-300)
        if not multiple or not case.agrees(rest, multiple * weights):
            return None
    return "weight decay: the difference is a multiple of the weights"


def _micro_batches(case: _Case) -> str | None:
    """Every piece is a sum of what the micro-batches add, with other weights than 1."""
    parts = case.values.micro_batches(case.step, case.name) if case.kind == "gradients" else []
    if len(parts) < 2:
        return None
    patterns = set()
    for piece in case.pieces:
        columns = torch.stack([piece.of(part) for part in parts], dim=1)
        if len(columns) < 2 * len(parts):
            return None
        weights = torch.linalg.lstsq(columns, piece.values.unsqueeze(1), driver="gelsd").solution.squeeze(1)
        if not case.agrees(columns @ weights, piece.values):
            return None
        # Without -0.0.
        counts = [round(float(weight), 4) + 0.0 for weight in weights]
        patterns.add(_pattern(counts, piece.row.place, case.sizes))
    return "; ".join(sorted(patterns))


def _pattern(weights: list[float], place: Place, sizes: Sizes) -> str:
    """Return which micro-batches count how often."""
    # For retrieval, one micro-batch of the reference is that of all replicas.
    replicas = len(weights) // sizes.accumulation
    counting = {number % replicas for number, weight in enumerate(weights) if weight}
    counts = {weight for weight in weights if weight}
    if replicas > 1 and len(counting) == len(counts) == 1:
        whose = "this replica" if counting == {place.data} else f"replica {counting.pop()}"
        return f"only {whose}'s micro-batches count, {_number(counts.pop())} times"
    rounds = [weights[start : start + replicas] for start in range(0, len(weights), replicas)]
    used = [number for number, round_ in enumerate(rounds) if any(round_)]
    if len(used) < len(rounds):
        shown = ", ".join(str(number + 1) for number in used)
        return f"only micro-batch {shown} of {len(rounds)} of each replica counts"
    return "micro-batches count " + ", ".join(map(_number, weights)) + " times"


def _missing_sum(axis: str) -> Callable[[_Case], str | None]:
    """Return the hypothesis that copies are parts of a sum over a group."""

    def hypothesis(case: _Case) -> str | None:
        size = case.sizes.of(axis)
        for members in _along(axis, case.pieces):
            if size < 2 or len(members) != size or len({(each.block, each.start) for each in members}) > 1:
                return None
            expected = members[0].of(case.whole)
            total = torch.stack([each.values for each in members]).sum(dim=0)
            if not (case.agrees(total, expected) or case.agrees(total, size * expected)):
                return None
        return f"the sum over the {_GROUPS[axis]} group is missing: each rank has its part"

    return hypothesis


def _along(axis: str, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces of ranks that differ along an axis alone."""
    sets: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
    for piece in pieces:
        sets[tuple(getattr(piece.row.place, other) for other in _GROUPS if other != axis)].append(piece)
    return iter(sets.values())


def _swapped(case: _Case) -> str | None:
    """Every piece is the expected one of another rank."""
    if not case.pieces[0].row.is_split:
        return None
    for piece in case.pieces:
        if not any(case.agrees(piece.values, other) for other in _other_blocks(piece, case.whole)):
            return None
    return "a shard is swapped: ranks of the tensor-parallel group hold each other's parts"


def _other_blocks(piece: Piece, whole: Tensor) -> Iterator[Tensor]:
    """Yield the parts of a tensor that other ranks could hold in place of this one."""
    for dim, (start, stop) in enumerate(piece.block):
        length = stop - start
        if length and length < whole.shape[dim]:
            for first in range(0, whole.shape[dim] - length + 1, length):
                if first != start:
                    block = list(piece.block)
                    block[dim] = (first, first + length)
                    yield Piece(row=piece.row, block=tuple(block), start=piece.start, values=piece.values).of(
                        whole
                    )


def _permuted(case: _Case) -> str | None:
    """Every piece has the expected values in another order."""
    for piece in case.pieces:
        expected = piece.of(case.whole)
        if not case.agrees(piece.values.sort().values, expected.sort().values):
            return None
    return "the values are those expected, in another order: rows or columns are permuted"


def _same_norm(case: _Case) -> str | None:
    rows = [piece.row for piece in case.pieces]
    if all(row.expected and abs(row.found / row.expected - 1.0) < 1e-4 for row in rows):
        return "same norm, other direction"
    return None


_HYPOTHESES: Sequence[Callable[[_Case], str | None]] = (
    _not_finite,
    _number_of_ranks,
    _zero,
    _factor,
    _decay,
    _missing_sum("tensor"),
    _missing_sum("stage"),
    _micro_batches,
    _missing_sum("data"),
    _swapped,
    _permuted,
    _same_norm,
)


def _what(cases: Sequence[_Case], rows: Sequence[Row]) -> str:
    """Return which tensors differ, and on which ranks."""
    names = [case.name for case in cases]
    all_names = {row.name for row in rows}
    shown = (
        names[0]
        if len(names) == 1
        else f"{pluralize(len(names), 'tensor')} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
    )
    if set(names) == all_names and len(names) > 1:
        shown = f"all {pluralize(len(names), 'tensor')}"
    first = cases[0]
    text = shown if first.kind == first.name else f"{first.kind}: {shown}"
    step = f", step {first.step}" if first.step else ""
    return f"{text}{step}, {_ranks(cases, rows)}"


def _ranks(cases: Sequence[_Case], rows: Sequence[Row]) -> str:
    """Return on which ranks tensors differ."""
    names = {case.name for case in cases}
    everyone = {row.place.rank: row.place for row in rows}
    holders = {row.place.rank for row in rows if row.name in names}
    wrong = {piece.row.place.rank: piece.row.place for case in cases for piece in case.pieces}
    if len(wrong) == len(everyone):
        return "on all ranks"
    for axis in _GROUPS:
        values = {getattr(place, axis) for place in wrong.values()}
        alike = [place for place in everyone.values() if getattr(place, axis) in values]
        if len(values) == 1 and len(alike) == len(wrong):
            return f"on {axis} {values.pop()} ({_listed(wrong)})"
    return "on all ranks that hold it" if len(wrong) == len(holders) else f"on {_listed(wrong)}"


def _listed(ranks: Mapping[int, Place]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


# What a signature that starts like this means.
_MEANINGS: Mapping[str, str] = {
    "only this replica's": "the average over the data-parallel group is missing",
    "only replica": "all of the data-parallel group compute with the samples of one",
    "the sum over the pipeline": "the all-reduce of tied weights",
    "the sum over the tensor-parallel": "the all-reduce of partial gradients, or of a layer's input gradient",
}


def _meaning(signature: str, cases: Sequence[_Case], rows: Sequence[Row]) -> str:
    """Return what a signature means for these tensors."""
    first = cases[0]
    if signature == _NUMBER:
        return _meaning_of_norm(first) if first.kind == "gradient norm" else _meaning_of_loss(first)
    if signature.startswith(_FACTOR):
        piece = first.pieces[0]
        expected = piece.of(first.whole)
        return _meaning_of_factor(float(piece.values @ expected) / float(expected @ expected), cases, rows)
    if signature == _OWN_FACTORS and first.kind in ("weights", "optimizer states"):
        return f"{signature}: clipping or the optimizer uses the norm of the rank's part, not the tensor's"
    if signature == _UNKNOWN:
        row = max((piece.row for case in cases for piece in case.pieces), key=lambda row: row.error)
        cosine = row.product / (row.expected * row.found) if row.expected and row.found else 0.0
        ratio = row.found / row.expected if row.expected else 0.0
        return f"{_UNKNOWN}: cosine {cosine:.6f}, {ratio:.6g} times the norm{_shared_by(first)}"
    more = next((text for start, text in _MEANINGS.items() if signature.startswith(start)), None)
    return signature if more is None else f"{signature}: {more}"


def _meaning_of_factor(factor: float, cases: Sequence[_Case], rows: Sequence[Row]) -> str:
    """Return which group a factor points to, by the tensors that have it."""
    sizes = cases[0].sizes
    names = {case.name for case in cases}
    everything = {row.name for row in rows}
    split = {row.name for row in rows if row.is_split}
    groups = {group: sizes.of(axis) for axis, group in _GROUPS.items()}
    groups["micro-batches of an update"] = sizes.accumulation
    likely = [
        name for name, size in groups.items() if size > 1 and (_is(factor, size) or _is(factor, 1 / size))
    ]
    if names == everything:
        likely = [name for name in likely if name != "tensor-parallel"] or likely
    elif names <= split or not names & split:
        likely = [name for name in likely if name == "tensor-parallel"] or likely
    shown = f"{_number(factor)} times the expected value"
    if not likely:
        return shown
    group = " or the ".join(
        f"{name} group" if name.endswith(("parallel", "pipeline")) else name for name in likely
    )
    action = "summed over the" if factor > 1 else "divided by the size of the"
    return f"{shown}: {action} {group} once too often"


def _meaning_of_loss(case: _Case) -> str:
    """Return what a loss points to: of its gradients, what each micro-batch adds may say more."""
    expected = float(case.whole)
    found = {piece.row.place.rank: float(piece.values) for piece in case.pieces}
    shown = f"{', '.join(f'{loss:.6g}' for loss in dict.fromkeys(found.values()))}; expected {expected:.6g}"
    means = [torch.cat([piece.values for piece in members]).mean() for members in _along("data", case.pieces)]
    if len(set(found.values())) > 1 and all(case.agrees(mean, case.whole) for mean in means):
        return f"{shown}: the average over the data-parallel group is missing"
    if case.step > 1:
        return f"{shown}: the model may not compute with the updated weights, which agree{_shared_by(case)}"
    return f"{shown}: the forward pass differs{_shared_by(case)}"


def _shared_by(case: _Case) -> str:
    """Return which groups there are, one of which shares what differs."""
    groups = [group for axis, group in _GROUPS.items() if case.sizes.of(axis) > 1]
    return f", in what the {' or the '.join(groups)} group shares" if groups else ""


def _meaning_of_norm(case: _Case) -> str:
    """Return which squares a norm misses or counts twice; the gradients themselves agree."""
    expected = float(case.whole)
    norms = {piece.row.place.rank: float(piece.values) for piece in case.pieces}
    shown = f"{', '.join(f'{norm:.6g}' for norm in dict.fromkeys(norms.values()))}; expected {expected:.6g}"
    for axis, group in _GROUPS.items():
        spread = [
            {round(float(piece.values), 9) for piece in members} for members in _along(axis, case.pieces)
        ]
        if any(len(each) > 1 for each in spread):
            return f"{shown}: the sum of squares over the {group} group is missing"
    found = next(iter(norms.values()))
    for axis, group in _GROUPS.items():
        size = case.sizes.of(axis)
        if size > 1 and _is(found, sqrt(size) * expected):
            return f"{shown}: the squares are summed over the {group} group once too often"
    rest, names = found**2 - expected**2, case.values.names("gradients", case.step)
    for name in names:
        gradient = case.values.get("gradients", case.step, name)
        if gradient is not None and _is(float(gradient.double().square().sum()), abs(rest)):
            what = f"counts {name}, a tied weight or another copy, twice" if rest > 0 else f"misses {name}"
            return f"{shown}: it {what}"
    direction = "counts copies more than once" if rest > 0 else "misses tensors, or a sum over a group"
    return f"{shown}, although the gradients agree: it {direction}"


def _is(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= 1e-3 * wanted


def _number(value: float) -> str:
    """Return a number, of a small fraction as 1/n."""
    inverse = 1.0 / value if value else 0.0
    if abs(inverse - round(inverse)) < 1e-6 * abs(inverse) and round(inverse) > 1:
        return f"1/{round(inverse)}"
    return f"{value:.6g}"

"""What the differences between a layout and one process mean.

The first kind of value that differs is explained; later ones follow from the reference's values, so that they
differ for another reason. Explanations are hypotheses that are tried on the values: what each micro-batch
adds to the reference's gradient, the parts of other ranks, and sums over ranks.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from neox_config.counted import counted
from neox_launcher.protocol.layout_verification import Finding, LayoutAnswer, Part
from neox_model.verify_layout.observer import Values
from neox_model.verify_layout.rows import KINDS, Piece, Place, Row

__all__ = ["Sizes", "answer_of"]

_MOST_FINDINGS = 8
_GROUPS = ("tensor-parallel", "data-parallel", "pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The layout.

    Args:
        data: data-parallel size.
        tensor: tensor-parallel size.
        stages: pipeline stages.
        accumulation: micro-batches per update and replica.
        is_sharded: data-parallel ranks hold parts of gradients.
        splits_sequence: sequence parallelism.
    """

    data: int
    tensor: int
    stages: int
    accumulation: int
    is_sharded: bool
    splits_sequence: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """All differing pieces of one tensor, and how to look at them."""

    name: str
    pieces: Sequence[Piece]
    values: Values
    sizes: Sizes
    limit: float

    @property
    def kind(self) -> str:
        return self.pieces[0].row.kind

    @property
    def step(self) -> int:
        return self.pieces[0].row.step

    @property
    def whole(self) -> Tensor:
        found = self.values.get(self.kind, self.step, self.name)
        assert found is not None, "it was compared"
        return found

    def agrees(self, found: Tensor, expected: Tensor) -> bool:
        """Return True if values agree up to rounding."""
        scale = max(float(expected.norm()), 1e-300)
        return float((found - expected).norm()) <= max(100 * self.limit, 1e-8) * scale


def answer_of(
    rows: Sequence[Row],
    pieces: Sequence[Piece],
    missing: Sequence[tuple[str, str]],
    values: Values,
    sizes: Sizes,
    *,
    limit: float,
) -> LayoutAnswer:
    """Summarize what all ranks compared.

    Args:
        rows: all comparisons.
        pieces: what differs first on each rank.
        missing: kind and name of what the reference has not.
        values: what the reference computed.
        sizes: the layout.
        limit: the largest relative error that is rounding.
    """
    findings = [
        Finding(
            what=f"{kind}: {name}", meaning="one process has no such tensor: its name depends on the layout"
        )
        for kind, name in sorted(set(missing))[:_MOST_FINDINGS]
    ]
    wrong = sorted((row for row in rows if row.error > limit), key=lambda row: row.order)
    if wrong:
        first = wrong[0].order
        mine = [piece for piece in pieces if piece.row.order == first]
        findings += _explained(mine, [row for row in rows if row.order == first], values, sizes, limit)
    return LayoutAnswer(parts=tuple(_parts(rows, limit)), findings=tuple(findings[:_MOST_FINDINGS]))


def _parts(rows: Sequence[Row], limit: float) -> Iterator[Part]:
    for kind in KINDS:
        errors = [row.error for row in rows if row.kind == kind]
        if errors:
            differing = sum(error > limit for error in errors)
            yield Part(name=kind, compared=len(errors), differing=differing, worst=max(errors), limit=limit)


def _explained(
    pieces: Sequence[Piece], rows: Sequence[Row], values: Values, sizes: Sizes, limit: float
) -> list[Finding]:
    """Return one finding for all tensors that differ in the same way."""
    by_name: dict[str, list[Piece]] = defaultdict(list)
    for piece in sorted(pieces, key=lambda each: each.row.place.rank):
        by_name[piece.row.name].append(piece)
    cases = [
        _Case(name=name, pieces=found, values=values, sizes=sizes, limit=limit)
        for name, found in by_name.items()
    ]
    by_meaning: dict[str, list[_Case]] = defaultdict(list)
    for case in cases:
        by_meaning[_signature(case)].append(case)
    found = [
        Finding(what=_what(same, rows), meaning=_meaning(signature, same, rows))
        for signature, same in by_meaning.items()
    ]
    return sorted(found, key=lambda finding: finding.meaning.startswith(_UNKNOWN))


_UNKNOWN = "unlike any known fault"
_FACTOR, _OWN_FACTORS = "factor", "each rank's part has a factor of its own"


def _signature(case: _Case) -> str:
    """Return how the pieces of a tensor differ."""
    return next(filter(None, (hypothesis(case) for hypothesis in _HYPOTHESES)), _UNKNOWN)


def _not_finite(case: _Case) -> str | None:
    if all(piece.values.isfinite().all() for piece in case.pieces):
        return None
    return "values are not finite"


def _factor(case: _Case) -> str | None:
    """Every piece is the expected one, times the same number."""
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
    return "the values are 0"


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
        patterns.add(_pattern([round(float(weight), 4) for weight in weights], piece.row.place, case.sizes))
    return "; ".join(sorted(patterns))


def _pattern(weights: list[float], place: Place, sizes: Sizes) -> str:
    """Return which micro-batches count how often."""
    replicas = [number % sizes.data for number in range(len(weights))]
    own = [weight for weight, replica in zip(weights, replicas, strict=True) if replica == place.data]
    others = [weight for weight, replica in zip(weights, replicas, strict=True) if replica != place.data]
    if others and not any(others) and len(set(own)) == 1:
        return f"only this replica's micro-batches count, {_number(own[0])} times"
    rounds = [weights[start : start + sizes.data] for start in range(0, len(weights), sizes.data)]
    counting = [number for number, round_ in enumerate(rounds) if any(round_)]
    if len(counting) < len(rounds):
        shown = ", ".join(str(number + 1) for number in counting)
        return f"only micro-batch {shown} of {len(rounds)} of each replica counts"
    return "micro-batches count " + ", ".join(map(_number, weights)) + " times"


def _missing_sum(
    group: str, place_of: Callable[[Place], tuple[int, ...]], size_of: Callable[[Sizes], int]
) -> Callable[[_Case], str | None]:
    """Return the hypothesis that copies are parts of a sum over a group."""

    def hypothesis(case: _Case) -> str | None:
        size = size_of(case.sizes)
        sets: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
        for piece in case.pieces:
            sets[place_of(piece.row.place)].append(piece)
        for members in sets.values():
            if size < 2 or len(members) != size or len({(each.block, each.start) for each in members}) > 1:
                return None
            expected = members[0].of(case.whole)
            total = torch.stack([each.values for each in members]).sum(dim=0)
            if not (case.agrees(total, expected) or case.agrees(total, size * expected)):
                return None
        return f"the sum over the {group} group is missing: each rank has its part"

    return hypothesis


def _swapped(case: _Case) -> str | None:
    """Every piece is the expected one of another rank."""
    if not case.pieces[0].row.is_split:
        return None
    for piece in case.pieces:
        if not any(case.agrees(piece.values, other) for other in _other_blocks(piece, case.whole)):
            return None
    return "ranks hold each other's parts: a shard is swapped"


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
    if all(abs(row.found / row.expected - 1.0) < 1e-4 for row in rows if row.expected):
        return "same norm, other direction"
    return None


_HYPOTHESES: Sequence[Callable[[_Case], str | None]] = (
    _not_finite,
    _zero,
    _factor,
    _missing_sum("tensor-parallel", lambda place: (place.data, place.stage), lambda sizes: sizes.tensor),
    _missing_sum("pipeline", lambda place: (place.data, place.tensor), lambda sizes: sizes.stages),
    _micro_batches,
    _missing_sum("data-parallel", lambda place: (place.tensor, place.stage), lambda sizes: sizes.data),
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
        else f"{counted(len(names), 'tensor')} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
    )
    if set(names) == all_names and len(names) > 1:
        shown = f"all {counted(len(names), 'tensor')}"
    first = cases[0]
    text = shown if first.kind == first.name else f"{first.kind}: {shown}"
    step = f", step {first.step}" if first.step else ""
    return f"{text}{step}, {_ranks(cases, rows)}"


def _ranks(cases: Sequence[_Case], rows: Sequence[Row]) -> str:
    names = {case.name for case in cases}
    holders = {row.place.rank: row.place for row in rows if row.name in names}
    wrong = {piece.row.place.rank: piece.row.place for case in cases for piece in case.pieces}
    if len(wrong) == len(holders):
        return "on all ranks that hold it" if len(names) == 1 else "on all ranks"
    for axis in ("data", "tensor", "stage"):
        values = {getattr(place, axis) for place in wrong.values()}
        alike = [place for place in holders.values() if getattr(place, axis) in values]
        if len(values) == 1 and len(alike) == len(wrong):
            return f"on {axis} {values.pop()} ({_listed(wrong)})"
    return f"on {_listed(wrong)}"


def _listed(ranks: Mapping[int, Place]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


# What a signature that starts like this means.
_MEANINGS: Mapping[str, str] = {
    "only this replica's": "the average over the data-parallel group is missing",
    "the sum over the pipeline": "the all-reduce of tied weights",
    "the sum over the tensor-parallel": "the all-reduce of partial gradients, or of a layer's input gradient",
}


def _meaning(signature: str, cases: Sequence[_Case], rows: Sequence[Row]) -> str:
    """Return what a signature means for these tensors."""
    first = cases[0]
    if first.kind == "gradient norm":
        return _meaning_of_norm(first)
    if signature.startswith(_FACTOR):
        piece = first.pieces[0]
        expected = piece.of(first.whole)
        return _meaning_of_factor(float(piece.values @ expected) / float(expected @ expected), cases, rows)
    if signature == _OWN_FACTORS and first.kind in ("weights", "optimizer states"):
        return f"{signature}: the optimizer uses a norm of the rank's part in place of the whole tensor's"
    if signature == _UNKNOWN:
        row = max((piece.row for case in cases for piece in case.pieces), key=lambda row: row.error)
        cosine = row.product / (row.expected * row.found) if row.expected and row.found else 0.0
        ratio = row.found / row.expected if row.expected else 0.0
        return f"{_UNKNOWN}: cosine {cosine:.6f}, {ratio:.6g} times the norm"
    more = next((text for start, text in _MEANINGS.items() if signature.startswith(start)), None)
    return signature if more is None else f"{signature}: {more}"


def _meaning_of_factor(factor: float, cases: Sequence[_Case], rows: Sequence[Row]) -> str:
    """Return which group a factor points to, by the tensors that have it."""
    sizes = cases[0].sizes
    names = {case.name for case in cases}
    everything = {row.name for row in rows}
    split = {row.name for row in rows if row.is_split}
    groups = {
        "tensor-parallel": sizes.tensor,
        "data-parallel": sizes.data,
        "pipeline": sizes.stages,
        "micro-batches of an update": sizes.accumulation,
    }
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


def _meaning_of_norm(case: _Case) -> str:
    """Return which squares a norm misses or counts twice; the gradients themselves agree."""
    expected = float(case.whole)
    norms = {piece.row.place.rank: float(piece.values) for piece in case.pieces}
    ratio = next(iter(norms.values())) / expected if expected else 0.0
    if len({round(norm / expected, 9) for norm in norms.values()}) > 1:
        shown = ", ".join(f"{norm:.6g}" for norm in norms.values())
        return f"ranks have different norms ({shown}; expected {expected:.6g}): a sum over a group is missing"
    sizes = case.sizes
    for name, size in zip(_GROUPS, (sizes.tensor, sizes.data, sizes.stages), strict=True):
        if size > 1 and _is(ratio, sqrt(size)):
            return f"{ratio:.4f} times: the squares are summed over the {name} group once too often"
    direction = "misses tensors, or a sum over a group" if ratio < 1 else "counts copies more than once"
    return f"{ratio:.6f} times the expected norm, although the gradients agree: it {direction}"


def _is(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= 1e-3 * wanted


def _number(value: float) -> str:
    """Return a number, of a small fraction as 1/n."""
    inverse = 1.0 / value if value else 0.0
    if abs(value) < 1 and abs(inverse - round(inverse)) < 1e-6 * abs(inverse) and round(inverse):
        return f"1/{round(inverse)}"
    return f"{value:.6g}"

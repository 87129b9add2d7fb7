"""What a cell of the precision sweep must agree in, how closely, and what is said where it does not.

An update is projected on float32's, and compared with plain autograd's in the same precision. A tensor of
few elements, or one whose gradient nearly cancels, is further than 1 % from float32's in plain autograd, too:
it is allowed a multiple of that distance (`_NOISE`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from precision.kinds import kind_of
from precision.run import PRECISIONS, Cell, Observed
from support.architectures import EXPERTS

__all__ = ["Judgement", "judge_adam", "judge_scales", "judge_update"]

# Tensors whose update is smaller than this part of the largest one are compared by absolute error.
_SMALL = 1e-3
# How far a computation may be from plain autograd's, as a multiple of plain autograd's distance from float32.
# Two computations whose rounding errors are alike in size and independent differ by sqrt(2) of that distance.
# With tensor parallelism, two halves of a sum are rounded before the sum is: twice the variance, so sqrt(3).
# The largest of thousands of tensors differs by less than twice as much.
_NOISE = {"same": 2 * 2**0.5, "rounded": 2 * 2**0.5, "reordered": 2 * 3**0.5}

_RATIO = {"fp32": 1e-4, "bf16": 0.01, "fp16": 0.003}
_COSINE = {"fp32": 1 - 1e-6, "bf16": 0.99, "fp16": 0.999}
_LOSS = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 5e-4}
_NORM = {"fp32": 1e-4, "bf16": 2e-3, "fp16": 1e-3}
# Reordered sums move the norm of a model this small by up to one rounding of all its gradients alike.
_REORDERED_NORM = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 2e-3}

# The same operations in the same order, but for a tied matrix: a pipeline adds its two gradients in float32,
# plain autograd in 16 bit. That moves the norm, and with clipping all updates alike.
_SAME = {"fp32": 1e-4, "bf16": 2e-4, "fp16": 1e-4}
# A few further roundings, each of at most half a unit in the last place: 2 to the power of -8 in bfloat16.
_ROUNDED = {"fp32": 1e-4, "bf16": 2 * 2.0**-8, "fp16": 2 * 2.0**-11}
_SUMS = {
    "one process": "same",
    "data parallel": "same",
    "torch, pipeline x data": "same",
    "pipeline": "same",
    "torch, pipeline": "same",
    # DeepSpeed divides, sends and partly sums gradients in the precision of the model.
    "ZeRO 1": "rounded",
    "ZeRO 2": "rounded",
    "ZeRO 3": "rounded",
    "pipeline x ZeRO 1": "rounded",
    # The torch engine divides and sends them in that precision.
    "torch, ZeRO 1": "rounded",
    "torch, ZeRO 2": "rounded",
    "torch, ZeRO 3": "rounded",
    "torch, pipeline x ZeRO 1": "rounded",
    "torch, pipeline x ZeRO 2": "rounded",
    "torch, pipeline x ZeRO 3": "rounded",
    # Products are sums over ranks of sums that were rounded to 16 bit; so are all activations that follow.
    "tensor parallel": "reordered",
    "sequence parallel": "reordered",
    "pipeline x tensor": "reordered",
    "torch, pipeline x tensor": "reordered",
    "ZeRO 3 x tensor": "reordered",
    "torch, ZeRO x tensor": "reordered",
}
_PIPELINES = ("pipeline", "torch, pipeline", "torch, pipeline x data")


@dataclass
class Judgement:
    """Figures of a comparison, and what is wrong.

    Args:
        findings: one sentence for each; empty where all agrees.
        ratio: the projection on float32's update that is farthest from 1.
        own_ratio: the same of plain autograd.
        cosine: the smallest cosine with float32's update.
        difference: the largest relative difference from plain autograd.
        tensors: how many were compared, small ones left out.
        underflows: tensors that plain autograd, too, gets wrong at a loss scale of 1, and not at 128.
    """

    findings: list[str] = field(default_factory=list)
    ratio: float = 1.0
    own_ratio: float = 1.0
    cosine: float = 1.0
    difference: float = 0.0
    tensors: int = 0
    underflows: int = 0

    def include(self, other: "Judgement", *, label: str = "", only_findings: bool = False) -> None:
        """Take over another's findings and, where they are worse, its figures."""
        self.findings += [label + finding for finding in other.findings]
        self.underflows += other.underflows
        if only_findings:
            return
        self.ratio = _farther(self.ratio, other.ratio)
        self.own_ratio = _farther(self.own_ratio, other.own_ratio)
        self.cosine = min(self.cosine, other.cosine)
        self.difference = max(self.difference, other.difference)
        self.tensors += other.tensors


@dataclass(frozen=True)
class _Projection:
    """Compare a tensor with float32's and plain autograd's, as numbers."""

    name: str
    size: float
    ratio: float
    own_ratio: float
    cosine: float
    difference: float
    noise: float
    error: float
    numbers: int


def judge_update(cell: Cell, found: Observed, plain: Observed, exact: Observed) -> Judgement:
    """Judge one SGD update."""
    result = Judgement()
    result.findings += _wrong_reports(cell, found, plain, exact)
    _judge_tensors(cell, result, "update", found.updates, plain.updates, exact.updates)
    return result


def judge_adam(cell: Cell, found: Observed, plain: Observed, exact: Observed) -> Judgement:
    """Judge Adam's moments and counts after three updates."""
    result = Judgement()
    result.findings += _wrong_reports(cell, found, plain, exact)
    if found.steps != plain.steps:
        result.findings.append(f"the optimizer's `step` is {found.steps}, must be {plain.steps}")
    if cell.precision != "fp32" and _share_of_rounded(cell, found) > 0.5:
        result.findings.append(f"the master weights are rounded to {cell.precision}")
    for moment in ("exp_avg", "exp_avg_sq"):
        chosen = [
            {name: value for name, value in one.states.items() if name.endswith(f"/{moment}")}
            for one in (found, plain, exact)
        ]
        _judge_tensors(cell, result, moment, *chosen, follows_rounded_weights=True)
    return result


def judge_scales(by_scale: dict[int, Observed], plain: dict[int, Observed], exact: Observed) -> Judgement:
    """Judge that the loss scale cancels out of every tensor whose gradients plain autograd does not lose."""
    result = Judgement()
    largest = max(float(update.norm()) for update in exact.updates.values())
    normal = by_scale[128]
    floor = _SMALL * largest
    for scale, found in by_scale.items():
        for name in found.updates.keys() & exact.updates.keys():
            update = found.updates[name]
            noise = _distance(plain[128].updates[name], exact.updates[name], floor=floor)
            lost = _distance(plain[scale].updates[name], exact.updates[name], floor=floor)
            if scale == 1 and lost > max(0.01, 2 * noise):
                result.underflows += 1
                continue
            apart = _distance(update, normal.updates[name], floor=floor)
            allowed = max(2e-3, _NOISE["rounded"] * max(lost, noise))
            if not apart <= allowed:
                result.findings.append(
                    f"{name}: the update at a loss scale of {scale} differs from that at 128 by {apart:.2g}, "
                    f"must be within {allowed:.2g}"
                )
    return result


def _wrong_reports(cell: Cell, found: Observed, plain: Observed, exact: Observed) -> Iterator[str]:
    # Optimizers of ZeRO update flat tensors, in which a copy may lie where another instruction reaches it.
    if not found.spread <= (1e-6 if kind_of(cell.layout) == "pipeline x ZeRO 1" else 0.0):
        yield f"ranks hold copies of one weight that differ by {found.spread:.2g}"
    if found.stale:
        yield f"the model's weights are not the masters, rounded: {', '.join(found.stale[:4])}"
    losses, norms = _own_distance(plain.losses, exact.losses), _own_distance(plain.norms, exact.norms)
    for number, (one, other) in enumerate(zip(found.losses, plain.losses, strict=True), 1):
        if not abs(one - other) <= max(_LOSS[cell.precision], _drift(cell, number) * losses) * abs(other):
            yield f"the loss of update {number} is reported as {one}, must be {other:.6g}"
    for number, (norm, other) in enumerate(zip(found.norms, plain.norms, strict=True), 1):
        allowed = max(_norm_tolerance(cell, number), _drift(cell, number) * norms)
        if norm is None or not abs(norm - other) <= allowed * abs(other):
            yield f"the gradient norm of update {number} is reported as {norm}, must be {other:.6g}"


def _own_distance(plain: list[float], exact: list[float]) -> float:
    """Return plain autograd's largest relative distance from float32 over the updates."""
    return max(abs(one - other) / abs(other) for one, other in zip(plain, exact, strict=True))


def _drift(cell: Cell, update: int) -> float:
    """Return how far an update may be from plain autograd's, in units of plain autograd's own distance."""
    # Before the first update all weights are equal. After it, Adam has moved a weight whose gradient nearly
    # cancels by a whole step in either direction, so trainings that round differently drift apart, also those
    # that only add the gradients of replicas or of micro-batches in another order.
    return 0.0 if update == 1 else _noise(cell)


def _norm_tolerance(cell: Cell, update: int) -> float:
    # After one update of Adam, some weights with a gradient near zero are rounded to another 16-bit number.
    # DeepSpeed's ZeRO 3 replaces torch's linear function by one that rounds products before it adds the bias,
    # which makes another activation as soon as a bias is not zero any more.
    is_reordered = _sums(cell) == "reordered" or (_sums(cell) == "rounded" and update > 1)
    return _kinks(cell) * (_REORDERED_NORM if is_reordered else _NORM)[cell.precision]


def _share_of_rounded(cell: Cell, found: Observed) -> float:
    """Part of the trained masters that are numbers of the model's 16-bit type."""
    trained = [found.masters[name] for name, update in found.updates.items() if update.any()]
    masters = torch.cat([master.flatten() for master in trained])
    return float((masters == masters.to(PRECISIONS[cell.precision]).float()).float().mean())


def _judge_tensors(
    cell: Cell,
    result: Judgement,
    what: str,
    found: dict[str, Tensor],
    plain: dict[str, Tensor],
    exact: dict[str, Tensor],
    *,
    follows_rounded_weights: bool = False,
) -> None:
    if found.keys() != exact.keys():
        missing, more = exact.keys() - found.keys(), found.keys() - exact.keys()
        result.findings.append(f"{what}: missing of {sorted(missing)}, unexpected of {sorted(more)}")
        return
    infinite = [name for name, value in found.items() if not value.isfinite().all()]
    if infinite:
        result.findings.append(f"{what} is not finite: {', '.join(infinite)}")
        return
    errors = _pooled_errors(plain, exact)
    projections = [_project(name, found[name], plain[name], exact[name], errors[name]) for name in exact]
    largest = max(one.size for one in projections)
    large = [one for one in projections if one.size >= _SMALL * largest]
    result.include(_figures(large))
    noisy = _sums(cell) == "reordered" or follows_rounded_weights
    wrong: list[_Projection] = []
    for one in projections:
        is_large = one.size >= _SMALL * largest
        reason = _off(cell, one, is_noisy=noisy) if is_large else _off_when_small(cell, one, largest)
        if reason:
            wrong.append(one)
            result.findings.append(f"{one.name}: {what} {reason}")
    result.findings += _common_factor(what, wrong, len(projections))


def _pooled_errors(plain: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return plain autograd's distance from float32 for each tensor: the largest in its pool of like tensors.

    A pool contains the tensors whose names differ in numbers only. Single numbers share another one, by
    relative distance, because each of them may be close to float32's by chance.
    """
    sizes = {name: float(value.double().norm()) for name, value in exact.items()}
    errors = {name: float((plain[name].double() - exact[name].double()).norm()) for name in exact}
    singles = [name for name in exact if exact[name].numel() == 1 and sizes[name]]
    relative = max((errors[name] / sizes[name] for name in singles), default=0.0)
    pools = {name: re.sub(r"\d+", "", name) for name in exact}
    farthest: dict[str, float] = {}
    for name, pool in pools.items():
        farthest[pool] = max(errors[name], farthest.get(pool, 0.0))
    pooled = {name: farthest[pool] for name, pool in pools.items()}
    return pooled | {name: max(pooled[name], relative * sizes[name]) for name in singles}


def _project(name: str, found: Tensor, plain: Tensor, exact: Tensor, error: float) -> _Projection:
    u, p, q = (tensor.double().flatten() for tensor in (found, plain, exact))
    size, length, own_length = float(q.norm()), float(u.norm()), float(p.norm())
    square = size * size
    return _Projection(
        name,
        size,
        ratio=float(u @ q) / square if square else 1.0,
        own_ratio=float(p @ q) / square if square else 1.0,
        cosine=float(u @ q) / (length * size) if length * size else 0.0,
        difference=float((u - p).norm()) / own_length if own_length else 0.0,
        noise=error / size if size else 0.0,
        error=float((u - p).norm()),
        numbers=u.numel(),
    )


def _figures(projections: list[_Projection]) -> Judgement:
    result = Judgement(tensors=len(projections))
    for one in projections:
        result.ratio = _farther(result.ratio, one.ratio)
        result.own_ratio = _farther(result.own_ratio, one.own_ratio)
        result.cosine = min(result.cosine, one.cosine)
        result.difference = max(result.difference, one.difference)
    return result


def _farther(one: float, other: float) -> float:
    """Return the one that is farther from 1."""
    return max(one, other, key=lambda ratio: abs(ratio - 1))


def _sums(cell: Cell) -> str:
    found = _SUMS[kind_of(cell.layout)]
    # A layer with experts uses its input up to five times. The two backward passes of a stage without bubbles
    # add the gradients of these uses in another order than plain autograd's one pass: updates are up to 9e-3
    # apart in bfloat16, and 3e-7 in float32.
    has_two_passes = cell.layout.endswith(("zero bubble", "ZBV"))
    return "reordered" if has_two_passes and cell.architecture in EXPERTS else found


def _noise(cell: Cell) -> float:
    return _NOISE[_sums(cell)] * _kinks(cell)


def _kinks(cell: Cell) -> int:
    # Rounding decides whether an element near the limit of a gate has a gradient: a few are most noise.
    # With the limit, the gradients of two tensor-parallel ranks are 3.4 % from float32's in float16 (plain
    # autograd's 1.5 %); without, 0.19 % (0.14 %); in float32, 5e-7.
    return 3 if "limits" in cell.architecture else 1


def _off(cell: Cell, one: _Projection, *, is_noisy: bool) -> str:
    """Say what is wrong with a tensor; nothing where it agrees."""
    noise = _noise(cell) * one.noise
    allowed = max(_RATIO[cell.precision], noise)
    if not abs(one.ratio - 1) <= allowed:
        return f"projected on float32's is {one.ratio:.4f}, must be within {allowed:.2g} of 1"
    least = min(_COSINE[cell.precision], 1 - noise**2 / 2)
    if not one.cosine >= least:
        return f"has a cosine of {one.cosine:.4f} with float32's, must be {least:.4f} or more"
    tolerance = _difference(cell, one.name)
    # A single number may be a sum of parts that nearly cancel; they are rounded before they are added.
    is_single = one.numbers == 1 and _sums(cell) == "rounded"
    if is_noisy or is_single:
        tolerance = max(tolerance, noise)
    if not one.difference <= tolerance:
        return f"differs from plain autograd's by {one.difference:.2g}, must be within {tolerance:.2g}"
    return ""


def _difference(cell: Cell, name: str) -> float:
    """How far a tensor may be from plain autograd's where the noise of 16 bit does not count."""
    kind = kind_of(cell.layout)
    is_tied = cell.tied and name.startswith("embedding.word_embeddings.")
    # Plain autograd adds the gradients of a weight's several uses in 16 bit, stages of a pipeline in float32.
    adds_otherwise = kind in _PIPELINES and (is_tied or "shared layers" in cell.architecture)
    # Replicas send gradients in the format that they were accumulated in.
    sends_rounded = kind in ("data parallel", "torch, pipeline x data") and cell.precision == "fp16"
    is_same = _sums(cell) == "same" and not adds_otherwise and not sends_rounded
    return (_SAME if is_same else _ROUNDED)[cell.precision]


def _off_when_small(cell: Cell, one: _Projection, largest: float) -> str:
    allowed = max(_RATIO[cell.precision] * _SMALL * largest, _noise(cell) * one.noise * one.size)
    if one.error <= allowed:
        return ""
    return f"(a small one) differs from plain autograd's by {one.error:.2g}, must be within {allowed:.2g}"


def _common_factor(what: str, wrong: list[_Projection], count: int) -> Iterator[str]:
    """Where most tensors are wrong by one factor, that is the finding."""
    if len(wrong) < count / 2:
        return
    factor = median(one.ratio / one.own_ratio for one in wrong)
    alike = [one for one in wrong if abs(one.ratio / one.own_ratio - factor) <= 0.02 * abs(factor)]
    if len(alike) > 0.9 * len(wrong) and abs(factor - 1) > 0.01:
        yield f"every {what} is {factor:.3g} times what it must be"


def _distance(one: Tensor, other: Tensor, *, floor: float) -> float:
    return float((one - other).norm()) / max(float(other.norm()), floor)

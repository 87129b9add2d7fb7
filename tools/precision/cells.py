"""The cells of the precision sweep: which are trained, and what came of one."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from math import isfinite
from typing import Any

from torch import distributed

from precision.checks import Judgement, judge_adam, judge_scales, judge_update
from precision.kinds import KINDS
from precision.reference import exact, plain
from precision.run import (
    ADAM,
    ALL_LAYOUTS,
    CLIPPING,
    PRECISIONS,
    SCALES,
    SGD,
    Cell,
    Observed,
    observe,
)
from support import layouts

__all__ = [
    "ARCHITECTURES",
    "FREE",
    "all_cells",
    "axes_of",
    "cells_of_experts",
    "check",
    "pairs_of",
    "sample",
]

# Gradients of low-rank adapters start near 0, where the tolerances of whole weights do not apply;
# tests/integration/test_adapters.py compares them in 16 bit. Losses of masked models have weights, which
# plain autograd here does not know; tests/integration/test_masked_models.py compares them in 16 bit.
# The figures of the last six are still to be recorded; `make sweep NAME=fields` compares them in bfloat16.
_LEFT_OUT = (
    "adapters",
    "scaled embeddings, scaled and capped logits, z-loss, clamped gates",
    "norms of outputs, of queries and keys over all heads",
    "norms on both sides and of heads, weights minus 1",
    "parallel residual with one norm, as of queries and keys",
    "limited scores, sinks and gates, heads of another width",
    "windows and rotary embeddings by kind",
)
ARCHITECTURES = tuple(name for name in layouts.CAUSAL_ARCHITECTURES if name not in _LEFT_OUT)

FREE: dict[str, tuple[Any, ...]] = {
    "clipping": tuple(CLIPPING),
    "accumulation": (1, 3),
    "tied": (False, True),
    "recomputes": (False, True),
}
"""Settings that do not need every combination with the others: every pair of values occurs."""


def axes_of(cell: Cell) -> dict[str, Any]:
    """All that is varied, the layout's parts included."""
    settings = cell.shape.settings
    return {
        "architecture": cell.architecture,
        "layout": cell.layout,
        "precision": cell.precision,
        "pipeline": min(2, settings.get("pipe_parallel_size", 0)),
        "ZeRO": settings.get("zero_optimization", {}).get("stage", 0),
        **{name: getattr(cell, name) for name in FREE},
    }


def pairs_of(cell: Cell) -> set[tuple[Any, ...]]:
    """Every two values of different axes that meet in the cell."""
    return set(combinations(axes_of(cell).items(), 2))


@cache
def all_cells() -> tuple[Cell, ...]:
    """Every architecture on every layout in every precision, the other settings in pairs."""
    return _with_pairs(Cell(*values) for values in product(ARCHITECTURES, ALL_LAYOUTS, PRECISIONS))


@cache
def sample() -> tuple[Cell, ...]:
    """Every kind of layout in bf16, every third one also in fp32 and the next also in fp16.

    Architectures and layouts of a kind come in turn.
    """
    names, chosen = list(ARCHITECTURES), []
    for place, layouts_of_kind in enumerate(KINDS.values()):
        for precision in ("bf16", *_ALSO[place % len(_ALSO)]):
            number = len(chosen)
            layout = layouts_of_kind[number % len(layouts_of_kind)]
            chosen.append(Cell(names[number % len(names)], layout, precision))
    return _with_pairs(chosen)


# Further precisions of the sample, for kinds of layouts in turn.
_ALSO: tuple[tuple[str, ...], ...] = (("fp32",), ("fp16",), ())


def cells_of_experts(architecture: str, precision: str) -> tuple[Cell, ...]:
    """One of the architectures with experts on every layout that has them; their figures are not recorded."""
    names = [name for name, layout in ALL_LAYOUTS.items() if layouts.trains(architecture, layout)]
    return _with_pairs(Cell(architecture, name, precision) for name in names)


def _with_pairs(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Choose the free settings of each cell so that it adds the most pairs that have not occurred."""
    generator, seen, chosen = random.Random(1), set(), []
    combined = [dict(zip(FREE, values, strict=True)) for values in product(*FREE.values())]
    for cell in cells:
        candidates = [replace(cell, **settings) for settings in generator.sample(combined, len(combined))]
        best = max(candidates, key=lambda candidate: len(pairs_of(candidate) - seen))
        seen |= pairs_of(best)
        chosen.append(best)
    return tuple(chosen)


def check(cell: Cell, *, scales: Sequence[int] = SCALES) -> Judgement | None:
    """Train the cell in the present world; its first rank gives the judgement. Collective.

    Args:
        cell: what to train.
        scales: loss scales to train an fp16 cell with; 128 is one of them.
    """
    scales = scales if cell.precision == "fp16" else (128,)
    found = {scale: observe(cell, SGD, scale=scale) for scale in scales}
    after_adam = observe(cell, ADAM)
    if distributed.get_rank() > 0:
        return None
    expected = {scale: plain(cell, SGD, scale=scale) for scale in scales}
    for seen in (*found.values(), after_adam):
        _leave_out_frozen(seen, expected[128])
    found = {scale: seen for scale, seen in found.items() if not _overflows_in_sum(cell, seen, scale)}
    result = Judgement()
    for scale in found:
        label = f"at a loss scale of {scale}: " if scale != 128 else ""
        result.include(judge_update(cell, found[scale], expected[scale], exact(cell, SGD)), label=label)
    result.include(judge_adam(cell, after_adam, plain(cell, ADAM), exact(cell, ADAM)), only_findings=True)
    result.include(judge_scales(found, expected, exact(cell, SGD)), only_findings=True)
    return result


def _leave_out_frozen(seen: Observed, expected: Observed) -> None:
    """Leave out the weights that are not trained and did not change; some layouts keep masters of them."""
    seen.updates = {
        name: update for name, update in seen.updates.items() if name in expected.updates or update.any()
    }


def _overflows_in_sum(cell: Cell, seen: Observed, scale: int) -> bool:
    """Whether gradients overflow because replicas add them before they divide, where their mean would not.

    Plain autograd must then overflow at a scale that is larger by the number of replicas.
    """
    if cell.precision != "fp16" or cell.replicas == 1 or scale == 128 or isfinite(seen.norms[0] or 0.0):
        return False
    return not isfinite(plain(cell, SGD, scale=scale * cell.replicas).norms[0] or 0.0)

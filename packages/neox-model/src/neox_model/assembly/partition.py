"""Divide the list of layers into consecutive parts, one per chunk of a pipeline stage.

The methods, and the choice among divisions that are equally good, are those of DeepSpeed's PipelineModule, so
that a stage holds the same layers under both engines.
"""

import re
from collections.abc import Sequence

import torch

from neox_model.assembly.as_sequential import LayerPlan
from neox_model.errors import LayoutError

__all__ = ["partition"]


def partition(plan: Sequence[LayerPlan], parts: int, method: str) -> list[tuple[int, int]]:
    """Return the first layer of each part, and the one after its last.

    Args:
        plan: the model as a list of layers.
        parts: number of parts.
        method: "parameters", "uniform" or "type:REGEX" over the layers' class names.

    Raises:
        LayoutError: there are fewer layers than parts, a part has no layer, or the regex matches no layer.
    """
    if len(plan) < parts:
        raise LayoutError(
            f"there are {parts} parts of the pipeline (stages x virtual-pipeline-stages), but the model has "
            f"only {len(plan)} layers (including embedding, norm and head); set a smaller pipe-parallel-size"
        )
    ends = _ends(plan, parts, method)
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    if any(start == stop for start, stop in bounds):
        raise LayoutError(
            f"pipe-partition-method {method!r} leaves a part of the pipeline without layers (start and end "
            f"of the parts' layers: {bounds}); set another method or a smaller pipe-parallel-size"
        )
    return bounds


def _ends(plan: Sequence[LayerPlan], parts: int, method: str) -> list[int]:
    kind, _, pattern = method.partition(":")
    if kind.lower() == "uniform":
        return _equal_lengths(len(plan), parts)
    if kind.lower() == "parameters":
        # Without allocating the parameters.
        with torch.device("meta"):
            modules = [layer.cls(**layer.kwargs) for layer in plan]
        return _equal_sums([sum(each.numel() for each in module.parameters()) for module in modules], parts)
    matches = [re.search(pattern, layer.cls.__name__, re.IGNORECASE) is not None for layer in plan]
    if not any(matches):
        names = ", ".join(sorted({layer.cls.__name__ for layer in plan}))
        raise LayoutError(
            f"pipe-partition-method {method!r} matches no layer; the classes of the layers are {names}"
        )
    return _equal_sums([int(match) for match in matches], parts)


def _equal_lengths(count: int, parts: int) -> list[int]:
    """Return the ends of parts whose lengths differ by one at most, the longer ones first."""
    length, longer = divmod(count, parts)
    return [length * part + min(part, longer) for part in range(1, parts + 1)]


def _equal_sums(weights: Sequence[int], parts: int) -> list[int]:
    """Return the ends of parts with the least difference between the largest and the smallest sum.

    Of equal divisions it takes the one whose last parts are the smallest, as far as its search keeps them.
    """
    if len(weights) <= parts:
        return _equal_lengths(len(weights), parts)
    totals = [0]
    for weight in weights:
        totals.append(totals[-1] + weight)
    # Position -> (largest sum, smallest sum, start of the last part) of the best division of the layers
    # before it into a number of parts, which the loop increases.
    best: dict[int, tuple[float, float]] = {0: (0.0, float("inf"))}
    starts: list[dict[int, int]] = []
    for number in range(1, parts + 1):
        found: dict[int, tuple[float, float]] = {}
        chosen: dict[int, int] = {}
        for end in range(number, len(weights) + 1):
            for start, (largest, smallest) in best.items():
                if start >= end:
                    continue
                extent = totals[end] - totals[start]
                candidate = (max(largest, extent), min(smallest, extent))
                if end not in found or candidate[0] - candidate[1] <= found[end][0] - found[end][1]:
                    found[end], chosen[end] = candidate, start
        best = found
        starts.append(chosen)
    ends = [len(weights)]
    for chosen in reversed(starts[1:]):
        ends.append(chosen[ends[-1]])
    return ends[::-1]

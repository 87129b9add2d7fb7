"""Which random numbers ranks draw for dropout: equal ones for equal activations, else different ones."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from neox_launcher.protocol.layout_verification import Finding, LayoutAnswer, Part
from neox_model.verify_layout.rows import Place

__all__ = ["Draw", "DropoutWatch", "with_draws"]

_MOST_FINDINGS = 4
# Digests of the input of a dropout, and of the generator's state before it.
Draw = tuple[str, str]


class DropoutWatch(TorchFunctionMode):
    """Within it, every dropout of this rank is noted in `draws`."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function; note its input and the state of the generator if it draws."""
        given = kwargs or {}
        if _probability(func, args, given) > 0.0:
            self.draws.append((_digest(args[0]), _digest(torch.get_rng_state())))
        return func(*args, **given)


def _probability(func: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]) -> float:
    """Return the probability with which a function drops values; 0 for other functions."""
    if func is functional.dropout:
        is_training = given.get("training", args[2] if len(args) > 2 else True)
        return float(given.get("p", args[1] if len(args) > 1 else 0.5)) if is_training else 0.0
    if func is functional.scaled_dot_product_attention:
        return float(given.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    return 0.0


def _digest(tensor: Tensor) -> str:
    values = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return blake2b(values.numpy().tobytes(), digest_size=8).hexdigest()


def with_draws(answer: LayoutAnswer, draws: Mapping[Place, Sequence[Draw]]) -> LayoutAnswer:
    """Add the comparison of random streams to an answer.

    Args:
        answer: the other comparisons.
        draws: the dropouts of each rank, in order; empty lists if nothing is dropped.
    """
    compared, findings = _compare(draws)
    if not compared and not findings:
        return answer
    worst = float(bool(findings))
    part = Part(name="random streams", compared=compared, differing=len(findings), worst=worst, limit=0.0)
    return replace(
        answer, parts=(*answer.parts, part), findings=(*answer.findings, *findings[:_MOST_FINDINGS])
    )


def _compare(draws: Mapping[Place, Sequence[Draw]]) -> tuple[int, list[Finding]]:
    """Return the number of pairs of ranks that were compared, and what is wrong."""
    compared, found = 0, []
    for axis, sets in (("tensor", _alike(draws, "tensor")), ("data", _alike(draws, "data"))):
        for places in sets:
            first, *others = places
            for other in others:
                for number, (one, two) in enumerate(zip(draws[first], draws[other], strict=False)):
                    compared += 1
                    must_agree = axis == "tensor" and one[0] == two[0]
                    if (one[1] == two[1]) != must_agree:
                        found.append(_finding(axis, number, first, other, must_agree=must_agree))
                if len(draws[first]) != len(draws[other]):
                    what = f"random streams: ranks {first.rank} and {other.rank}"
                    found.append(
                        Finding(what=what, meaning="the ranks have different numbers of dropouts in a step")
                    )
    return compared, found


def _alike(draws: Mapping[Place, Sequence[Draw]], axis: str) -> Iterator[list[Place]]:
    """Yield the ranks that differ along an axis alone."""
    sets: dict[tuple[int, ...], list[Place]] = defaultdict(list)
    for place in sorted(draws, key=lambda each: each.rank):
        sets[tuple(getattr(place, name) for name in ("data", "tensor", "stage") if name != axis)].append(
            place
        )
    return (places for places in sets.values() if len(places) > 1)


def _finding(axis: str, number: int, first: Place, other: Place, *, must_agree: bool) -> Finding:
    what = f"random streams: dropout {number + 1} of a step, ranks {first.rank} and {other.rank}"
    if axis == "data":
        return Finding(
            what=what, meaning="data-parallel replicas drop the same elements: their seeds are equal"
        )
    if must_agree:
        meaning = (
            "tensor-parallel ranks drop different elements of the same activations, whose copies then differ"
        )
    else:
        meaning = "tensor-parallel ranks drop the same elements of different parts: they share a stream"
    return Finding(what=what, meaning=meaning)

"""Compare the iterations of two runs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from neox_config.pluralize import pluralize
from neox_model.checkpoint.names import in_model_order
from neox_model.verify.findings import Findings
from neox_model.verify.records import Record
from neox_model.verify.rounding import Limits

__all__ = [
    "Steps",
    "common",
    "compare_repeated",
    "compare_resumed",
    "named_differences",
    "random_differences",
    "setting_differences",
]

REPEATED = "steps before the interruption"
_COUNTERS = ("engine.global_steps", "engine.global_samples")


@dataclass(frozen=True, slots=True)
class Steps:
    """Two records and the settings of their comparison.

    Args:
        expected: record of the uninterrupted run.
        found: record of the other run.
        iterations: iterations to compare.
        samples: number of samples per iteration.
        limits: differences considered rounding; None requires equality to the last bit.
        same_sizes: True if the parallel sizes are the same.
    """

    expected: Record
    found: Record
    iterations: range
    samples: int
    limits: Limits | None = None
    same_sizes: bool = True


def compare_repeated(steps: Steps, findings: Findings) -> None:
    """Compare the iterations of two runs before the interruption."""
    findings.row(REPEATED, "steps")
    for iteration in steps.iterations:
        findings.count(REPEATED)
        texts = [text for kind in _KINDS.values() for text in kind(steps, iteration).texts]
        if texts:
            findings.differ(REPEATED, texts[0], iteration=iteration, advice="repeat")


def compare_resumed(steps: Steps, findings: Findings) -> None:
    """Compare the iterations of a resumed run, kind by kind."""
    for name, compare in _KINDS.items():
        unit = _UNITS.get(name, "steps")
        findings.row(name, unit)
        if unit == "streams" and not steps.same_sizes:
            findings.skip(name, unit, "random streams start anew on other parallel sizes")
            continue
        for iteration in steps.iterations:
            result = compare(steps, iteration)
            findings.count(name, result.count)
            findings.measure(name, result.relative)
            for text in result.texts:
                findings.differ(name, text, iteration=iteration, advice="data" if name == "data" else "step")


@dataclass(frozen=True, slots=True)
class _Result:
    """Result for one row and iteration: number of compared items, differences, and the largest one."""

    count: int
    texts: list[str]
    relative: float = 0.0


def _first_sample(steps: Steps, iteration: int) -> int:
    """Return the index of the first sample of an iteration."""
    counters = _first(steps.expected, iteration)["counters"]
    return int(counters.get("training.samples", iteration * steps.samples)) - steps.samples


def _instead(steps: Steps, found: str, iteration: int) -> str:
    """Describe which sample was read instead, if the uninterrupted run read it in another iteration."""
    for other in sorted(steps.expected.steps, key=lambda other: abs(other - iteration)):
        samples, _ = steps.expected.samples(other)
        if found in samples:
            number = _first_sample(steps, other) + samples.index(found)
            return f"sample {number:,} of iteration {other:,} was read instead"
    return "other tokens were read, which the uninterrupted run read in no iteration"


def _data(steps: Steps, iteration: int) -> _Result:
    wanted, _ = steps.expected.samples(iteration)
    found, apart = steps.found.samples(iteration)
    if apart:
        return _Result(len(found), [f"data: in iteration {iteration:,} {apart}"])
    if len(wanted) != len(found):
        count = pluralize(len(found), "sample")
        return _Result(len(found), [f"data: iteration {iteration:,} read {count} instead of {len(wanted):,}"])
    texts = [
        f"data: sample {_first_sample(steps, iteration) + place:,} of iteration {iteration:,}: "
        f"{_instead(steps, there, iteration)}"
        for place, (here, there) in enumerate(zip(wanted, found, strict=True))
        if here != there
    ]
    if not texts and steps.limits is None:
        wanted_sizes, sizes = steps.expected.micro_batches(iteration), steps.found.micro_batches(iteration)
        texts = [
            f"data: rank {rank} read iteration {iteration:,} as micro-batches of {sizes[rank]} samples "
            f"instead of {expected}"
            for rank, expected in sorted(wanted_sizes.items())
            if rank in sizes and sizes[rank] != expected
        ]
    return _Result(len(found), texts)


def _settings(steps: Steps, iteration: int) -> _Result:
    """Compare the settings of the optimizer: learning rate, weight decay, betas."""
    count, texts = 0, []
    limit = None if steps.limits is None else steps.limits.setting
    ranks = steps.found.steps[iteration].keys() & steps.expected.steps[iteration].keys()
    for rank in sorted(ranks) if steps.limits is None else [min(ranks)]:
        wanted, found = steps.expected.steps[iteration][rank], steps.found.steps[iteration][rank]
        count += len(found["settings"])
        texts += setting_differences(wanted, found, rank, f"in iteration {iteration:,}", limit)
    return _Result(count, texts)


def setting_differences(
    wanted: Mapping[str, Any], found: Mapping[str, Any], rank: int, when: str, limit: float | None
) -> list[str]:
    """Describe the settings of an optimizer's parameter groups that differ on a rank."""
    return [
        f"optimizer setting {name} of parameter group {number} on rank {rank} {when}: "
        f"{_compared(there[name], here[name])}"
        for number, (here, there) in enumerate(zip(wanted["settings"], found["settings"], strict=False))
        for name in sorted(here.keys() & there.keys())
        if not is_close(here[name], there[name], limit)
    ]


def _number(name: str, key: str, limit_of: Callable[[Limits], float]) -> Callable[[Steps, int], _Result]:
    def compare(steps: Steps, iteration: int) -> _Result:
        wanted, found = _first(steps.expected, iteration)[key], _first(steps.found, iteration)[key]
        limit = None if steps.limits is None else limit_of(steps.limits)
        text = f"{name} of iteration {iteration:,}: {_compared(found, wanted)}"
        return _Result(1, [] if is_close(wanted, found, limit) else [text], _relative(wanted, found))

    return compare


def _compared(found: Any, wanted: Any) -> str:
    relative = _relative(wanted, found)
    size = f" ({relative:.1e} relative)" if math.isfinite(relative) else ""
    return f"{_shown(found)} instead of {_shown(wanted)}{size}"


def _counters(kind: str, *, of_scale: bool) -> Callable[[Steps, int], _Result]:
    def compare(steps: Steps, iteration: int) -> _Result:
        wanted, found = (
            {
                name: value
                for name, value in _first(record, iteration)["counters"].items()
                if (name.startswith("engine.") and name not in _COUNTERS) == of_scale
            }
            for record in (steps.expected, steps.found)
        )
        if steps.limits is not None:
            wanted, found = common(wanted, found)
        count = int(bool(wanted or found)) if of_scale else len(wanted)
        return _Result(count, named_differences(kind, wanted, found, f"after iteration {iteration:,}"))

    return compare


def common(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the counters that other layouts have in common: they may have no loss scale, or a fixed one.

    The recent losses are not exact on other layouts; the losses themselves are compared with their limit.
    """
    both = (wanted.keys() & found.keys()) - {"training.recent_losses"}
    return {name: wanted[name] for name in both}, {name: found[name] for name in both}


def _random(key: str, when: str) -> Callable[[Steps, int], _Result]:
    def compare(steps: Steps, iteration: int) -> _Result:
        count, texts = 0, []
        for rank, line in sorted(steps.found.steps[iteration].items()):
            wanted = steps.expected.steps[iteration].get(rank, {}).get(key, {})
            count += len(line[key])
            texts += random_differences(wanted, line[key], rank, f"{when} iteration {iteration:,}")
        return _Result(count, texts)

    return compare


def _updates(steps: Steps, iteration: int) -> _Result:
    """Compare the weights after an update by the sums of their elements."""
    if steps.limits is not None:
        return _Result(0, [])
    count, texts = 0, []
    for rank, line in sorted(steps.found.steps[iteration].items()):
        wanted, found = steps.expected.steps[iteration].get(rank, {}).get("sums", {}), line["sums"]
        count += len(found)
        texts += [
            f"weight {place} of rank {rank} after the update of iteration {iteration:,}: its sum is "
            f"{_compared(found.get(place), wanted.get(place))}"
            for place in in_model_order(wanted.keys() | found.keys())
            if not is_close(wanted.get(place), found.get(place), None)
        ]
    return _Result(count, texts)


def random_differences(
    wanted: Mapping[str, str], found: Mapping[str, str], rank: int, when: str
) -> list[str]:
    """Describe the random streams of a rank that differ."""
    return [
        f"random stream {name} of rank {rank} {when} is in another state"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]


def named_differences(kind: str, wanted: Mapping[str, Any], found: Mapping[str, Any], when: str) -> list[str]:
    """Describe the numbers that differ or are missing on one side."""
    return [
        f"{kind} {name} {when}: {_shown(found.get(name, 'missing'))} instead of "
        f"{_shown(wanted.get(name, 'none'))}"
        for name in sorted(wanted.keys() | found.keys())
        if not is_close(wanted.get(name, "none"), found.get(name, "missing"), None)
    ]


def is_close(wanted: Any, found: Any, limit: float | None) -> bool:
    """Return whether two values are equal, or numbers within a relative limit."""
    if _same(wanted, found):
        return True
    return limit is not None and _relative(wanted, found) <= limit


def _same(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, list) and isinstance(found, list):
        return len(wanted) == len(found) and all(map(_same, wanted, found))
    both_nan = all(isinstance(value, float) and math.isnan(value) for value in (wanted, found))
    return bool(wanted == found) or both_nan


def _relative(wanted: Any, found: Any) -> float:
    """Return the difference of two numbers relative to the larger; infinite if one is not finite."""
    if _same(wanted, found):
        return 0.0
    numbers = [value for value in (wanted, found) if isinstance(value, int | float)]
    largest = max((abs(value) for value in numbers), default=0.0)
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)):
        return math.inf
    return abs(wanted - found) / largest


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _first(record: Record, iteration: int) -> Mapping[str, Any]:
    """Return the record of the lowest rank; losses, norms and counters are the same on all."""
    lines = record.steps[iteration]
    return lines[min(lines)]


_UNITS = {
    "data": "samples",
    "random streams before": "streams",
    "random streams after": "streams",
    "updates": "weights",
    "counters": "numbers",
    "optimizer settings": "groups",
}
# In the order in which they take effect within an iteration, so that the first difference is the cause.
_KINDS: Mapping[str, Callable[[Steps, int], _Result]] = {
    "data": _data,
    "random streams before": _random("random_before", "at the start of"),
    "losses": _number("loss", "loss", lambda limits: limits.loss),
    "gradient norms": _number("gradient norm", "grad_norm", lambda limits: limits.norm),
    "optimizer settings": _settings,
    "updates": _updates,
    "loss scale": _counters("loss scale", of_scale=True),
    "counters": _counters("counter", of_scale=False),
    "random streams after": _random("random", "after"),
}

"""Compare two runs: steps, the state at the interruption, and the final state."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neox_config.errors import NeoXError
from neox_config.facts.checkpoints import MANIFEST
from neox_launcher.protocol.verification import Answer, Comparison, Side
from neox_launcher.worker.ranks import read_rank
from neox_launcher.worker.reporting import report_facts
from neox_model.checkpoint.comparison import counters_of, training_state
from neox_model.checkpoint.names import in_model_order, is_random_state
from neox_model.verify.findings import Findings
from neox_model.verify.records import Record, read_record
from neox_model.verify.rounding import LIMITS, Limits
from neox_model.verify.steps import (
    Steps,
    common,
    compare_repeated,
    compare_resumed,
    named_differences,
    random_differences,
    setting_differences,
)
from neox_model.verify.tensors import State, differences, differences_beyond_rounding

__all__ = ["compare", "compare_copies", "compare_from"]

logger = logging.getLogger(__name__)


def compare_from(_: object) -> None:
    """Compare the runs given by the launcher, and report the answer to it.

    The configuration of the runs is not read: the request is in the environment.
    """
    me = read_rank()
    report_facts(me.rank if me else 0, compare(Comparison.from_environment()).as_facts())


def compare(comparison: Comparison) -> Answer:
    """Compare an uninterrupted run with a resumed one.

    Raises:
        NeoXError: a record or a checkpoint is missing or damaged.
    """
    findings = Findings()
    limits = None if comparison.rounding is None else LIMITS[comparison.rounding]
    resumed = _record(comparison.resumed, range(0))
    # An iteration recorded by only some ranks was in progress when the run failed.
    last = max(
        (number for number, ranks in resumed.steps.items() if ranks.keys() >= resumed.places.keys()),
        default=comparison.middle,
    )
    is_complete = comparison.resumed.end is not None and Path(comparison.resumed.end, MANIFEST).is_file()
    expected = _record(comparison.expected, range(comparison.start + 1, comparison.end + 1))
    iterations = range(comparison.start + 1, comparison.middle + 1)
    interrupted = _record(comparison.interrupted, iterations)
    compare_repeated(Steps(expected, interrupted, iterations, comparison.samples), findings)
    _compare_restored(comparison, expected, resumed, findings)
    iterations = range(comparison.middle + 1, last + 1)
    steps = Steps(expected, resumed, iterations, comparison.samples, limits, comparison.same_sizes)
    compare_resumed(steps, findings)
    if is_complete:
        _compare_last(comparison, limits, findings)
    else:
        findings.skip("final state", "tensors", f"the resumed run ended after iteration {last:,}")
    advice = {comparison.middle: "restored", comparison.end: "step"}
    compare_copies(resumed, findings, row="copies of weights", advice=advice)
    return findings.answer()


def _record(side: Side, iterations: range) -> Record:
    """Read the record of a run, which must have all these iterations."""
    record = read_record(Path(side.record))
    missing = [iteration for iteration in iterations if not record.steps.get(iteration)]
    if missing:
        raise NeoXError(
            f"iteration {missing[0]:,} and {len(missing) - 1:,} more are missing in {side.record}; "
            "run the command again"
        )
    return record


def _compare_restored(comparison: Comparison, expected: Record, resumed: Record, findings: Findings) -> None:
    """Compare the state that the resumed run loaded with that of the uninterrupted one."""
    middle = comparison.middle
    one, other = _state(comparison.expected.middle), _state(comparison.resumed.middle)
    _compare_tensors("restored", one, other, middle, findings)
    _compare_numbers("restored", one, other, middle, findings, exact=comparison.rounding is None)
    _compare_random(comparison, one, other, findings)
    wanted, found = expected.states.get(middle, {}), resumed.states.get(middle, {})
    row = "restored optimizer settings"
    findings.row(row, "groups")
    limit = None if comparison.rounding is None else LIMITS[comparison.rounding].setting
    lowest = min(found)
    findings.count(row, len(found[lowest]["settings"]))
    for text in setting_differences(wanted[min(wanted)], found[lowest], lowest, "after loading", limit):
        findings.differ(row, text, iteration=middle, advice="restored")
    if comparison.rounding is not None:
        return
    # Digests of each rank's memory, which do not depend on checkpoints.
    row = "restored memory of each rank"
    findings.row(row, "pieces")
    for rank in sorted(found):
        for kind, what in (("kept", "in the optimizer"), ("used", "in the model")):
            here, there = wanted[rank][kind], found[rank][kind]
            findings.count(row, len(there))
            for place in in_model_order(here.keys() | there.keys()):
                if here.get(place) != there.get(place):
                    text = f"{place} {what} of rank {rank} is not what the uninterrupted run held"
                    findings.differ(row, text, iteration=middle, advice="restored")


def _compare_random(comparison: Comparison, one: State, other: State, findings: Findings) -> None:
    row = "restored random streams"
    if not comparison.same_sizes:
        findings.skip(row, "streams", "random streams start anew on other parallel sizes")
        return
    findings.row(row, "streams")
    names = {name for state in (one, other) for name in state.manifest.tensors if is_random_state(name)}
    findings.count(row, len(names))
    for name in sorted(names):
        _, rank, stream = name.split("/")
        wanted, found = (
            str([values.tolist() for values in state.chunks(name)])
            if name in state.manifest.tensors
            else "missing"
            for state in (one, other)
        )
        for text in random_differences({stream: wanted}, {stream: found}, int(rank), "after loading"):
            findings.differ(row, text, iteration=comparison.middle, advice="restored")


def _compare_last(comparison: Comparison, limits: Limits | None, findings: Findings) -> None:
    one, other = _state(comparison.expected.end), _state(comparison.resumed.end)
    end = comparison.end
    beyond = None if limits is None else (_state(comparison.expected.middle), limits)
    _compare_tensors("final", one, other, end, findings, beyond=beyond)
    _compare_numbers("final", one, other, end, findings, exact=limits is None)


def _compare_tensors(
    when: str,
    one: State,
    other: State,
    iteration: int,
    findings: Findings,
    *,
    beyond: tuple[State, Limits] | None = None,
) -> None:
    """Compare weights and optimizer states.

    `when` is the first word of the rows and the key of the advice; `beyond` are the state at the interruption
    and what is considered rounding (None: nothing is).
    """
    for kind, of_weights in (("weight", True), ("optimizer state", False)):
        row = f"{when} {kind}s"
        findings.row(row, "tensors")
        if beyond is None:
            found = differences(one, other, of_weights=of_weights)
            findings.count(row, len(one.names(of_weights=of_weights)))
        else:
            middle, limits = beyond
            found = differences_beyond_rounding(middle, one, other, limits, of_weights=of_weights)
        for difference in found:
            if beyond is not None:
                findings.count(row)
            findings.measure(row, difference.relative)
            if difference.text:
                text = f"{when} {kind} {difference.name} at iteration {iteration:,}: {difference.text}"
                findings.differ(row, text, iteration=iteration, advice=when)


def _compare_numbers(
    when: str,
    one: State,
    other: State,
    iteration: int,
    findings: Findings,
    *,
    exact: bool,
) -> None:
    """Compare the optimizer's numbers of each weight, loss scale, schedule and counters."""
    scalars, counters = (tuple(numbers(state) for state in (one, other)) for numbers in (_scalars, _counters))
    if not exact:
        counters = common(*counters)
    rows = {"step counts": ("optimizer state", scalars), "counters": ("counter", counters)}
    for name, (kind, (wanted, found)) in rows.items():
        row = f"{when} {name}"
        findings.row(row, "numbers")
        findings.count(row, len(wanted))
        for text in named_differences(kind, wanted, found, f"at iteration {iteration:,}"):
            findings.differ(row, text, iteration=iteration, advice=when)


def _scalars(state: State) -> dict[str, Any]:
    """Return the states that are one number for each weight, such as Adam's count of updates."""
    return {
        f"{name}/{key}": number["value"]
        for name, numbers in state.manifest.optimizer_scalars.items()
        for key, number in numbers.items()
    }


def _counters(state: State) -> dict[str, Any]:
    manifest = state.manifest
    # Counts that older versions did not record are computed.
    training = counters_of(training_state(manifest))
    parts = {"training": training, "engine": manifest.engine, "schedule": manifest.schedule}
    return {"iteration": manifest.iteration, **_flat(parts)}


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested entries to dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = _flat(value) if isinstance(value, Mapping) else None
        found |= {name: value} if inner is None else {f"{name}.{key}": one for key, one in inner.items()}
    return found


def _state(folder: str | None) -> State:
    assert folder is not None, "every run that is compared leaves its states"
    return State(Path(folder))


def compare_copies(record: Record, findings: Findings, *, row: str, advice: Mapping[int, str]) -> None:
    """Compare the weights in use on all ranks: replicas, tensor-parallel copies and tied weights.

    Args:
        record: record of the run.
        findings: collects the differences.
        row: row of the table.
        advice: iteration to the key of the advice for a difference in its state.
    """
    findings.row(row, "pieces")
    for iteration in advice:
        holders: dict[str, tuple[int, str]] = {}
        for rank, line in sorted(record.states.get(iteration, {}).items()):
            for place, values in line["used"].items():
                findings.count(row)
                first, known = holders.setdefault(place, (rank, values))
                if known != values:
                    where = f"on ranks {first} and {rank} differ at iteration {iteration:,}"
                    text = f"the copies of {place} {where}"
                    findings.differ(row, text, iteration=iteration, advice=advice[iteration])

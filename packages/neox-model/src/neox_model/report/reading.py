"""Read everything that a run has left behind: its record, the failures of its workers, its checkpoints."""

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neox_config.facts.checkpoints import MANIFEST, complete_checkpoints, iteration_of
from neox_model.metrics.writers.jsonl import FAILURES, RECORD, read_records, superseded_from

__all__ = ["Attempt", "Column", "Run", "read_run"]

_HEAD = ("time", "attempt", "iteration")


@dataclass(slots=True)
class Column:
    """The values of one metric, in the order of the record."""

    iterations: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, iteration: int, value: float) -> None:
        """Append a value."""
        self.iterations.append(iteration)
        self.values.append(value)

    @property
    def last(self) -> float:
        """The last value."""
        return self.values[-1]


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One start of the training.

    Args:
        number: from 1.
        first: iteration that it continues from.
        last: last iteration in its record.
        began: time of its first line in seconds since 1970; None if an older version wrote it.
        ended: time of its last line.
        start: what it recorded about itself; empty if nothing.
        end: the event of its end; None if it was killed or is still running.
        failures: failures of its workers, earliest first.
    """

    number: int
    first: int
    last: int = 0
    began: float | None = None
    ended: float | None = None
    start: Mapping[str, Any] = field(default_factory=dict)
    end: Mapping[str, Any] | None = None
    failures: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Run:
    """A run as its files show it.

    Args:
        folder: the log folder.
        columns: the metrics in effect, by name.
        repeated: the metrics of iterations that a later attempt repeated, by number of the attempt.
        events: all events in the order of the record, except those that describe attempts.
        attempts: at least one.
        checkpoints: iteration and time of each complete checkpoint that still exists.
        missing: what the files lack, in words.
    """

    folder: Path
    columns: dict[str, Column] = field(default_factory=dict)
    repeated: dict[int, dict[str, Column]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    checkpoints: list[tuple[int, float]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the log folder."""
        return self.folder.resolve().name

    @property
    def about(self) -> Mapping[str, Any]:
        """What the last attempt that described itself recorded."""
        return next((one.start for one in reversed(self.attempts) if one.start), {})

    @property
    def last_iteration(self) -> int:
        """The last iteration of the last attempt."""
        return self.attempts[-1].last

    def last_value(self, metric: str) -> float | None:
        """Return the last value of a metric; None if it was not recorded."""
        return self.columns[metric].last if metric in self.columns else None


def read_run(folder: Path) -> Run:
    """Read the files of a run.

    Args:
        folder: its log folder.

    Raises:
        OSError: the folder has no readable `metrics.jsonl`.
    """
    path = folder / RECORD
    limits = superseded_from(path)
    run, attempts = Run(folder=folder), dict[int, Attempt]()
    for record in read_records(path):
        number, iteration = record.get("attempt", 1), record["iteration"]
        attempt = attempts.setdefault(number, Attempt(number=number, first=0))
        attempt.last, attempt.ended = iteration, record.get("time")
        if "event" in record:
            _add_event(run, attempt, record)
            continue
        is_in_effect = iteration <= limits.get(number, iteration)
        columns = run.columns if is_in_effect else run.repeated.setdefault(number, {})
        for name, value in record.items():
            if name not in _HEAD and isinstance(value, int | float):
                columns.setdefault(name, Column()).add(iteration, value)
    run.attempts = sorted(attempts.values(), key=lambda one: one.number) or [Attempt(number=1, first=0)]
    _add_failures(run)
    _add_checkpoints(run)
    run.missing += _missing(run)
    return run


def _add_event(run: Run, attempt: Attempt, record: dict[str, Any]) -> None:
    kind = record["event"]
    if kind == "attempt":
        attempt.first, attempt.began = record["iteration"], record.get("time")
    elif kind == "start":
        attempt.start = record
    elif kind == "end":
        attempt.end = record
    else:
        run.events.append(record)


def _add_failures(run: Run) -> None:
    """Give each recorded failure to the attempt that was running."""
    path = run.folder / FAILURES
    if not path.exists():
        run.missing.append("failures of workers: none were recorded by the agents of neox-launch")
        return
    earlier = 0
    for failure in sorted(_failures(path), key=lambda one: one["time"]):
        began = [one for one in run.attempts if (one.began or 0.0) <= failure["time"]]
        if began:
            began[-1].failures.append(failure)
        else:
            earlier += 1
    if earlier:
        run.missing.append(f"{earlier:,} failures of {FAILURES}: they are older than the first attempt")


def _failures(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        for line in lines:
            try:
                failure = json.loads(line)
            except ValueError:  # A line that a full disk or a kill cut short.
                continue
            if isinstance(failure, dict) and isinstance(failure.get("time"), int | float):
                yield failure


def _add_checkpoints(run: Run) -> None:
    save = run.about.get("save")
    if not save:
        run.missing.append("checkpoints: the record does not name their absolute folder (save)")
        return
    folder = Path(save)
    if not folder.is_dir():
        run.missing.append(f"checkpoints: {save} does not exist on this host")
        return
    for path in complete_checkpoints(folder):
        iteration = iteration_of(path.name)
        if iteration is not None:
            run.checkpoints.append((iteration, (path / MANIFEST).stat().st_mtime))
    run.checkpoints.sort()


# What a page shows -> the metrics of which at least one must be there, and why they may not be.
_WANTED: Mapping[str, tuple[Sequence[str], str]] = {
    "training loss": (("loss/train",), "no iteration was logged yet"),
    "validation loss": (("loss/validation",), "no evaluation has taken place (eval-interval, eval-iters)"),
    "memory": (("memory/host_bytes", "memory/host_peak_bytes"), "an older version wrote the record"),
    "norms of weights": (
        ("param_norms/",),
        "log-param-norm is not set",
    ),
    "norms of gradients by tensor": (("gradient_norms/",), "log-grad-norm is not set"),
    "times of phases": (("time/forward",), "wall-clock-breakdown is not set"),
}


def _missing(run: Run) -> Iterator[str]:
    for what, (prefixes, why) in _WANTED.items():
        if not any(name.startswith(tuple(prefixes)) for name in run.columns):
            yield f"{what}: {why}"
    if not run.about:
        yield "configuration, packages, code and estimate: an older version wrote the record"

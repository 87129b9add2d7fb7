"""Read everything that a run has left behind: its record, the failures of its workers, its checkpoints."""

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neox_config.facts.checkpoints import MANIFEST, complete_checkpoints, iteration_of
from neox_config.facts.records import FAILURES, RECORD
from neox_config.pluralize import pluralize
from neox_model.errors import ModelError
from neox_model.metrics.writers.jsonl import FORMAT, read_records, superseded_from

__all__ = [
    "Attempt",
    "Column",
    "RecordError",
    "Run",
    "read_run",
    "read_runs",
]

_HEAD = ("time", "attempt", "iteration")
# A run that starts from the beginning renames the record of an earlier one to metrics.1.jsonl.
_EARLIER = re.compile(rf"{Path(RECORD).stem}\.([0-9]+){Path(RECORD).suffix}")


class RecordError(ModelError):
    """There is no record, because the run failed before its first iteration, or it is of another version."""

    exit_code = 2


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
    """One start of the run.

    Args:
        number: from 1.
        first: iteration that it continues from.
        last: last iteration in its record.
        began: time of its first line in seconds since 1970; None if an older version wrote it.
        ended: time of its last line.
        start: what it recorded about itself; empty if nothing.
        end: the event of its end; None if it was killed or is still running.
        failures: failures of its workers and hosts, earliest first.
        launch: name of the launch; None without neox-launch, or from an older version.
    """

    number: int
    first: int
    last: int = 0
    began: float | None = None
    ended: float | None = None
    start: Mapping[str, Any] = field(default_factory=dict)
    end: Mapping[str, Any] | None = None
    failures: list[Mapping[str, Any]] = field(default_factory=list)
    launch: str | None = None

    @property
    def restart(self) -> int:
        """The number of the restart by neox-launch; 0 if someone started it."""
        return self.start.get("restart") or 0


@dataclass(slots=True, kw_only=True)
class Run:
    """A run as its files show it.

    Args:
        source: the log folder, or in it the record of an earlier run.
        label: its name among several runs; empty: the name of the source.
        columns: the metrics in effect, by name.
        repeated: the metrics of iterations that a later attempt repeated, by number of the attempt.
        events: all events in the order of the record, except those that describe attempts.
        in_effect: the events without those of iterations that a later attempt repeated.
        attempts: at least one.
        checkpoints: iteration and time of each complete checkpoint that still exists.
        unrecorded: failures of starts that recorded nothing else.
    """

    source: Path
    label: str = ""
    columns: dict[str, Column] = field(default_factory=dict)
    repeated: dict[int, dict[str, Column]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    in_effect: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    checkpoints: list[tuple[int, float]] = field(default_factory=list)
    unrecorded: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the source, or the part of its path that differs from those of other runs."""
        return self.label or self.source.resolve().name

    @property
    def record(self) -> Path:
        """The file with its metrics and events."""
        return self.source / RECORD if self.source.is_dir() else self.source

    @property
    def about(self) -> Mapping[str, Any]:
        """What the last attempt that trained and described itself recorded; else the last that did so."""
        described = [one for one in reversed(self.attempts) if one.start]
        trained = (one.start for one in described if one.last > one.first)
        return next(trained, described[0].start if described else {})

    @property
    def restarts(self) -> int:
        """Restarts by neox-launch, also those that ended before their first record."""
        last: dict[str | None, int] = {}
        for attempt in self.attempts:
            last[attempt.launch] = max(last.get(attempt.launch, 0), attempt.restart)
        for failure in self.unrecorded:
            launch = failure.get("launch")
            last[launch] = max(last.get(launch, 0), failure.get("restart") or 0)
        return sum(last.values())

    @property
    def last_iteration(self) -> int:
        """The last iteration of the last attempt."""
        return self.attempts[-1].last

    def last_value(self, metric: str) -> float | None:
        """Return the last value of a metric; None if it was not recorded."""
        return self.columns[metric].last if metric in self.columns else None


def read_run(source: Path) -> Run:
    """Read the files of a run.

    Args:
        source: its log folder, or in it the record of an earlier run.

    Raises:
        OSError: it cannot be read.
        RecordError: the folder has no `metrics.jsonl`, or another version wrote it.
    """
    run, attempts = Run(source=source), dict[int, Attempt]()
    path = run.record
    if not (path.is_file() and (path.name == RECORD or _EARLIER.fullmatch(path.name))):
        failures = _failures(source / FAILURES)
        if not failures:
            raise RecordError(f"{path}: no record of a run; pass the folder that log-dir names")
        count, last = pluralize(len(failures), "failure"), str(failures[-1].get("message")).partition("\n")[0]
        raise RecordError(f"{path}: no iteration was recorded; {FAILURES} has {count}, last: {last}")
    limits = superseded_from(path)
    for record in read_records(path):
        number, iteration = record.get("attempt", 1), record["iteration"]
        attempt = attempts.setdefault(number, Attempt(number=number, first=0))
        attempt.last, attempt.ended = iteration, record.get("time")
        is_in_effect = iteration <= limits.get(number, iteration)
        if "event" in record:
            _add_event(run, attempt, record, is_in_effect=is_in_effect)
            continue
        columns = run.columns if is_in_effect else run.repeated.setdefault(number, {})
        for name, value in record.items():
            if name not in _HEAD and isinstance(value, int | float):
                columns.setdefault(name, Column()).add(iteration, value)
    if not attempts:
        raise RecordError(f"no line of {path} is a record; restore the file, or pass another folder")
    run.attempts = sorted(attempts.values(), key=lambda one: one.number)
    _add_failures(run)
    _add_checkpoints(run)
    return run


def read_runs(sources: Sequence[Path]) -> list[Run]:
    """Read several runs by `read_run`, and name each by the shortest ends of their paths that differ.

    Raises:
        OSError: one cannot be read.
        RecordError: a folder has no `metrics.jsonl`, or another version wrote one.
    """
    runs = [read_run(source) for source in sources]
    paths = [source.resolve() for source in sources]
    longest = max(len(path.parts) for path in paths)
    ends = [[str(Path(*path.parts[-length:])) for path in paths] for length in range(1, longest + 1)]
    labels = next(found for found in ends if len(set(found)) == len(set(paths)))
    for run, label in zip(runs, labels, strict=True):
        run.label = label
    return runs


def _add_event(run: Run, attempt: Attempt, record: dict[str, Any], *, is_in_effect: bool) -> None:
    kind = record["event"]
    if kind == "attempt":
        if record.get("format") != FORMAT:
            raise RecordError(
                f"{run.record} has the format {record.get('format')}, and this version reads "
                f"{FORMAT}; use neox-report of the version that trained it"
            )
        attempt.first, attempt.began = record["iteration"], record.get("time")
        attempt.launch = record.get("launch")
    elif kind == "start":
        attempt.start = record
    elif kind == "end":
        attempt.end = record
    else:
        run.events.append(record)
        if is_in_effect:
            run.in_effect.append(record)


def _add_failures(run: Run) -> None:
    """Give each recorded failure to the attempt that was running."""
    path = run.record.with_name(run.record.name.replace(Path(RECORD).stem, Path(FAILURES).stem, 1))
    for failure in _failures(path):
        place = _place_of(failure, run)
        if place is not None:
            place.append(failure)


def _place_of(failure: Mapping[str, Any], run: Run) -> list[Mapping[str, Any]] | None:
    """Return the failures of the attempt that was running; None if the failure is older than all attempts.

    If its start recorded nothing else, it is one of the run.
    """
    launch, restart = failure.get("launch"), failure.get("restart")
    mine = [one for one in run.attempts if launch is None or one.launch == launch]
    if mine and launch is not None and restart is not None and all(one.start for one in mine):
        same = [one for one in mine if one.restart == restart]
        return same[-1].failures if same else run.unrecorded
    began = [one for one in mine if (one.began or 0.0) <= failure["time"]]
    if began:
        return began[-1].failures
    is_foreign = launch is None or not mine
    is_older = failure["time"] < (run.attempts[0].began or 0.0)
    return None if is_foreign and is_older else run.unrecorded


def _failures(path: Path) -> list[dict[str, Any]]:
    """Return the recorded failures, earliest first; none without a file."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            failure = json.loads(line)
        except ValueError:  # A line that a full disk or a kill cut short.
            continue
        if isinstance(failure, dict) and isinstance(failure.get("time"), int | float):
            found.append(failure)
    return sorted(found, key=lambda one: one["time"])


def _add_checkpoints(run: Run) -> None:
    save = run.about.get("save")
    if not save:
        return
    found = ((iteration_of(path.name), path / MANIFEST) for path in complete_checkpoints(Path(save)))
    run.checkpoints = sorted((number, path.stat().st_mtime) for number, path in found if number is not None)

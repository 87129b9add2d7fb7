"""Write the record of a run, which `neox-report` reads: JSON lines in one file for all attempts.

There is one line per `write` and one per event (docs/logging.md):
`{"time": 1763874000.25, "attempt": 1, "iteration": 100, "loss/train": 2.31, ...}`. A number that is not
finite is null, and `"nonfinite": {"loss/train": "nan"}` names it. Lines are only appended: a run that
continues begins with the event `attempt`, after whose iteration it repeats those of earlier attempts. Metrics
already recorded for that iteration are skipped.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from neox_config import finite_json
from neox_config.atomic import atomic_write, set_aside
from neox_config.facts.records import FAILURES, RECORD
from neox_config.pluralize import first_few, pluralize

__all__ = ["FORMAT", "JsonlWriter", "read_metrics", "read_records", "superseded_from"]

logger = logging.getLogger(__name__)

FORMAT = "neox-metrics-1"
# Damaged lines that a warning names.
_MOST_NAMED = 3
_ITERATIONS, _ATTEMPTS = range(2**63), range(1, 1_000_000)


class JsonlWriter:
    """Appends to `metrics.jsonl`, and begins a new attempt in it.

    Args:
        folder: created if missing.
        iteration: the run continues after this iteration. At 0, existing files are renamed to
            `metrics.1.jsonl` and `failures.1.jsonl` (or the next free number), except those of the same
            launch, whose restarts belong to the same run.
        launch: name of the launch; None without neox-launch.
        clock: returns the time in seconds since 1970.
    """

    def __init__(
        self,
        folder: Path,
        *,
        iteration: int,
        launch: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / RECORD
        self._clock = clock
        self._recorded: set[str] = set()
        self.attempt = 1
        self._start = iteration
        launches = [start.get("launch") for start in _starts(path)] if path.exists() else []
        is_same_launch = launch is not None and launches[-1:] == [launch]
        if path.exists() and (iteration or is_same_launch):
            _drop_truncated_line(path)
            self.attempt, self._recorded = _state_at(path, iteration)
        elif not iteration:
            _begin_new_run(path, folder / FAILURES, launch=launch)
        self._file = path.open("a", encoding="utf-8")
        self.event("attempt", iteration, {"format": FORMAT} | ({"launch": launch} if launch else {}))

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Append one line, without metrics that an earlier attempt recorded for this iteration."""
        is_first = iteration == self._start
        new = {name: value for name, value in metrics.items() if not is_first or name not in self._recorded}
        if new:
            self._append(iteration, new)

    def event(self, kind: str, iteration: int, content: Mapping[str, Any]) -> None:
        """Append the line of an event."""
        self._append(iteration, {"event": kind, **content})
        self.flush()

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, iteration: int, content: Mapping[str, Any]) -> None:
        head = {"time": round(self._clock(), 3), "attempt": self.attempt, "iteration": iteration}
        self._file.write(finite_json.dumps({**head, **content}) + "\n")


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every line of a `metrics.jsonl`, metrics and events, without a truncated last line.

    Damaged lines are skipped, and counted in one warning. Lines without an attempt, of an older version,
    are of the first.
    """
    damaged = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                continue
            record = _parse(line)
            if record is None:
                damaged.append(number)
            else:
                yield record
    if damaged:
        total, named = pluralize(len(damaged), "damaged line"), first_few(damaged, _MOST_NAMED)
        logger.warning("%s: skipped %s: %s", path, total, named)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the metrics in effect, with their iteration: those that no later attempt repeated, no events."""
    limits = superseded_from(path)
    for record in read_records(path):
        is_in_effect = record["iteration"] <= limits.get(record.get("attempt", 1), record["iteration"])
        if is_in_effect and "event" not in record:
            yield {name: value for name, value in record.items() if name not in ("time", "attempt")}


def superseded_from(path: Path) -> dict[int, int]:
    """Return for each attempt the iteration after which a later attempt repeated it; none for the last."""
    starts = {start.get("attempt", 1): start["iteration"] for start in _starts(path)}
    return {
        attempt: min(iteration for number, iteration in starts.items() if number > attempt)
        for attempt in range(1, max(starts, default=1))
    }


def _starts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the event with which each attempt begins."""
    with path.open("rb") as lines:
        for line in lines:
            # Parsing every line of a long run would take seconds.
            if b'"event": "attempt"' in line and line.endswith(b"\n"):
                record = _parse(line)
                if record is not None and record.get("event") == "attempt":
                    yield record


def _state_at(path: Path, iteration: int) -> tuple[int, set[str]]:
    """Return the number of the next attempt, and the metrics in effect of an iteration."""
    limits = superseded_from(path)
    last, recorded = 1, set[str]()
    for record in read_records(path):
        attempt = record.get("attempt", 1)
        last = max(last, attempt)
        if record["iteration"] == iteration <= limits.get(attempt, iteration) and "event" not in record:
            recorded |= record.keys() - {"time", "attempt", "iteration"}
    return last + 1, recorded


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a line of the record; None if it is damaged."""
    record = _dict_in(line)
    iteration, attempt = record.get("iteration"), record.get("attempt", 1)
    has_place = type(iteration) is int and iteration in _ITERATIONS
    return record if has_place and type(attempt) is int and attempt in _ATTEMPTS else None


def _dict_in(line: bytes) -> dict[str, Any]:
    """Return the object in a line; an empty one if it is damaged, as by a full disk or a kill."""
    try:
        found = finite_json.loads(line.decode())
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _drop_truncated_line(path: Path) -> None:
    """Remove a last line that a killed process left without its end, so that the next one begins a line."""
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _begin_new_run(record: Path, failures: Path, *, launch: str | None) -> None:
    """Rename the files of an older run to `NAME.N.jsonl`, both with the first N that is free.

    Failures of this launch, whose earlier attempts have recorded nothing else, remain.
    """
    lines = failures.read_bytes().splitlines(keepends=True) if failures.exists() else []
    mine = [line for line in lines if launch is not None and _dict_in(line).get("launch") == launch]
    if lines and len(mine) == len(lines) and not record.exists():
        return
    set_aside([record, failures])
    if mine:
        with atomic_write(failures) as file:
            file.buffer.writelines(mine)

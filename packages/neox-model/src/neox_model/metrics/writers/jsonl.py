"""Metrics as JSON lines: the machine-readable record of a run, read by `neox-report`.

One line per `write`: `{"iteration": 100, "loss/train": 2.31, ...}`. A resumed training first drops the
lines after its iteration and leaves out what is recorded of that iteration already, so that every iteration
has one story.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["JsonlWriter", "read_metrics"]

logger = logging.getLogger(__name__)


class JsonlWriter:
    """Appends to `metrics.jsonl`.

    Args:
        folder: made when missing.
        iteration: the training goes on after this one. From 0, an older record is kept aside as
            `metrics.1.jsonl` (or the next free number).
    """

    FILE = "metrics.jsonl"

    def __init__(self, folder: Path, *, iteration: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.FILE
        self._recorded: set[tuple[int, str]] = set()
        if path.exists() and iteration:
            self._recorded = _keep_until(path, iteration)
        elif path.exists():
            _move_aside(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Append one line, without what an earlier process recorded of this iteration."""
        new = {name: value for name, value in metrics.items() if (iteration, name) not in self._recorded}
        if new:
            self._file.write(json.dumps({"iteration": iteration, **new}) + "\n")

    def flush(self) -> None:
        """Hand the lines to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a `metrics.jsonl`; a last line that a kill cut short is left out.

    A damaged line is left out too, with a warning: it must neither stop a training nor hide the others.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                continue
            record = _parse(line)
            if record is None:
                logger.warning("%s, line %d is damaged and left out", path, number)
            else:
                yield record


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("iteration"), int) else None


def _keep_until(path: Path, iteration: int) -> set[tuple[int, str]]:
    """Drop later records; gives the (iteration, metric) pairs recorded of the last iteration kept."""
    aside = path.with_suffix(".jsonl.tmp")
    recorded = set()
    with aside.open("w", encoding="utf-8") as file:
        for record in read_metrics(path):
            if record["iteration"] <= iteration:
                file.write(json.dumps(record) + "\n")
            if record["iteration"] == iteration:
                recorded |= {(iteration, name) for name in record}
    os.replace(aside, path)
    return recorded


def _move_aside(path: Path) -> None:
    number = 1
    while (older := path.with_name(f"metrics.{number}.jsonl")).exists():
        number += 1
    path.rename(older)

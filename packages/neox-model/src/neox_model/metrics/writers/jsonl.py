"""Metrics as JSON lines: the machine-readable record of a run, read by `neox-report`.

One line per `write`: `{"iteration": 100, "loss/train": 2.31, ...}`. A resumed training first drops the
lines after its iteration, so that every iteration has one story.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["JsonlWriter", "read_metrics"]


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
        if path.exists():
            _keep_until(path, iteration) if iteration else _move_aside(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Append one line."""
        self._file.write(json.dumps({"iteration": iteration, **metrics}) + "\n")

    def flush(self) -> None:
        """Hand the lines to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a `metrics.jsonl`; a last line that a kill cut short is left out."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def _keep_until(path: Path, iteration: int) -> None:
    aside = path.with_suffix(".jsonl.tmp")
    with aside.open("w", encoding="utf-8") as file:
        for record in read_metrics(path):
            if record["iteration"] <= iteration:
                file.write(json.dumps(record) + "\n")
    os.replace(aside, path)


def _move_aside(path: Path) -> None:
    number = 1
    while (older := path.with_name(f"metrics.{number}.jsonl")).exists():
        number += 1
    path.rename(older)

"""Metrics as CSV files, one per metric."""

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

__all__ = ["CsvWriter"]


class CsvWriter:
    """Appends to one file per metric: `a/b` is written to `a_b.csv` as `step,b`.

    Args:
        folder: made when missing.
        step: the training goes on after this one: rows behind it are dropped. From 0, an older file is kept
            aside as `a_b.1.csv` (or the next free number).
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._start = step
        self._files: dict[str, TextIO] = {}

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Append a row to the file of each metric."""
        for name, value in metrics.items():
            csv.writer(self._file(name), lineterminator="\n").writerow((iteration, value))

    def flush(self) -> None:
        """Hand the rows to the operating system."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            path = self._folder / f"{name.replace('/', '_')}.csv"
            if path.exists():
                _keep_until(path, self._start) if self._start else _move_aside(path)
            is_new = not path.exists()
            file = path.open("a", encoding="utf-8", newline="")
            if is_new:
                file.write(f"step,{name.rpartition('/')[2]}\n")
            self._files[name] = file
        return self._files[name]


def _keep_until(path: Path, step: int) -> None:
    """Drop rows behind a step, and what a kill cut short."""
    with path.open(encoding="utf-8", newline="") as file:
        whole = [line for line in file if line.endswith("\n")]
    if not whole:
        path.unlink()
        return
    kept = [row for row in whole[1:] if _is_until(step, row)]
    aside = path.with_suffix(".csv.tmp")
    aside.write_text("".join([whole[0], *kept]), encoding="utf-8")
    os.replace(aside, path)


def _is_until(step: int, row: str) -> bool:
    number = row.partition(",")[0]
    return number.isdecimal() and int(number) <= step


def _move_aside(path: Path) -> None:
    number = 1
    while (older := path.with_name(f"{path.stem}.{number}.csv")).exists():
        number += 1
    path.rename(older)

"""Write metrics to CSV files, one per metric."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from neox_config.atomic import atomic_write, set_aside

__all__ = ["CsvWriter"]


class CsvWriter:
    """Appends to one file per metric: `a/b` is written to `a_b.csv` as `step,b`.

    Args:
        folder: created if missing.
        step: the run continues after this step: later rows are dropped, and rows that are there are
            not written again. At 0, an existing file is renamed to `a_b.1.csv` (or the next free number).
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._start = step
        self._files: dict[str, TextIO] = {}
        self._last_kept: dict[str, int] = {}

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Append a row to the file of each metric, unless an earlier process wrote that row."""
        for name, value in metrics.items():
            file = self._file(name)
            if iteration > self._last_kept[name]:
                csv.writer(file, lineterminator="\n").writerow((iteration, value))

    def flush(self) -> None:
        """Flush the files."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            path = self._folder / f"{name.replace('/', '_')}.csv"
            self._last_kept[name] = -1
            if path.exists() and self._start:
                self._last_kept[name] = _keep_until(path, self._start)
            elif path.exists():
                set_aside([path])
            is_new = not path.exists()
            file = path.open("a", encoding="utf-8", newline="")
            if is_new:
                file.write(f"step,{name.rpartition('/')[2]}\n")
            self._files[name] = file
        return self._files[name]


def _keep_until(path: Path, step: int) -> int:
    """Drop rows after a step, and a truncated last row; return the last step that remains, -1 if none."""
    with path.open(encoding="utf-8", newline="") as file:
        whole = [line for line in file if line.endswith("\n")]
    if not whole:
        path.unlink()
        return -1
    steps = [(row.partition(",")[0], row) for row in whole[1:]]
    kept = [(int(text), row) for text, row in steps if text.isdecimal() and int(text) <= step]
    with atomic_write(path) as file:
        file.writelines([whole[0], *(row for _, row in kept)])
    return max((last for last, _ in kept), default=-1)

"""What a comparison has found so far, and which difference came first."""

import math
from dataclasses import dataclass, field

from neox_launcher.verify_resume.exchange import Answer, Check

__all__ = ["Findings"]

_ADVICE = {
    "repeat": "two trainings from the same start differ before anything was resumed: the training is not "
    "deterministic here (kernels, hardware), so a resumed one cannot be compared to the last bit",
    "restored": "the checkpoint, the way it is loaded, or the configuration has changed it",
    "data": "neox-data trace --config FILE --iteration {before} lists the documents of that iteration",
    "step": "everything before it agrees, the restored state included",
    "final": "everything before it agrees",
}


@dataclass(slots=True)
class _Row:
    name: str
    unit: str
    compared: int = 0
    differing: int = 0
    worst: float = 0.0
    skipped: str = ""


@dataclass(frozen=True, slots=True, order=True)
class _Difference:
    iteration: int
    order: int
    number: int
    text: str = field(compare=False)
    advice: str = field(compare=False)


class Findings:
    """Collects the rows of the table and the differences."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._differences: list[_Difference] = []

    def row(self, name: str, unit: str) -> None:
        """Add a row to the end of the table, if it is not there."""
        self._rows.setdefault(name, _Row(name, unit))

    def count(self, name: str, number: int = 1) -> None:
        """Count things that were compared."""
        self._rows[name].compared += number

    def skip(self, name: str, unit: str, reason: str) -> None:
        """Add a row for what was not compared, and why."""
        self.row(name, unit)
        self._rows[name].skipped = reason

    def differ(self, name: str, text: str, *, iteration: int, advice: str) -> None:
        """Count one thing that differs.

        Args:
            name: the row.
            text: what differs, and by how much.
            iteration: when.
            advice: key of what to say about it.
        """
        order = list(self._rows).index(name)
        self._rows[name].differing += 1
        self._differences.append(_Difference(iteration, order, len(self._differences), text, advice))

    def measure(self, name: str, relative: float) -> None:
        """Note the size of a difference, within the limits or not, relative to the values compared."""
        row = self._rows[name]
        row.worst = max(row.worst, relative if math.isfinite(relative) else 0.0)

    def answer(self) -> Answer:
        """The table without rows in which there was nothing to compare, and the first difference."""
        first = min(self._differences, default=None)
        advice = "" if first is None else _ADVICE[first.advice].format(before=first.iteration - 1)
        rows = [row for row in self._rows.values() if row.compared or row.skipped or row.differing]
        checks = tuple(_check(row) for row in rows)
        return Answer(checks=checks, first="" if first is None else first.text, explanation=advice)


def _check(row: _Row) -> Check:
    compared = "" if row.skipped else _counted(row.compared, row.unit)
    return Check(
        name=row.name,
        compared=compared,
        differing=f"{row.differing:,} of them" if row.differing else "",
        worst=f"{row.worst:.1e} relative" if row.worst else "",
        skipped=row.skipped,
    )


def _counted(number: int, unit: str) -> str:
    return f"{number:,} {unit}" if number != 1 else f"1 {unit.removesuffix('s')}"

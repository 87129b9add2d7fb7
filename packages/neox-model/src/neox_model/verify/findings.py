"""Collect the differences that a comparison finds, and report the first one."""

import math
from dataclasses import dataclass, field

from neox_config.pluralize import pluralize
from neox_launcher.protocol.verification import Answer, Check

__all__ = ["Findings"]

_ADVICE = {
    "repeat": "two runs from the same start differ before the resume: the run is not "
    "deterministic here (kernels, hardware), so a resumed run cannot be compared to the last bit",
    "restored": "the checkpoint, loading it, or the configuration has changed it",
    "data": "neox-data trace --config FILE --iteration {before} lists the documents of that iteration",
    "step": "everything before this is equal, including the restored state",
    "final": "everything before this is equal",
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
    """Rows of the table, and the differences."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._differences: list[_Difference] = []

    def row(self, name: str, unit: str) -> None:
        """Append a row to the table, unless it exists."""
        self._rows.setdefault(name, _Row(name, unit))

    def count(self, name: str, number: int = 1) -> None:
        """Add to the number of compared items."""
        self._rows[name].compared += number

    def skip(self, name: str, unit: str, reason: str) -> None:
        """Add a row for a skipped comparison, with the reason."""
        self.row(name, unit)
        self._rows[name].skipped = reason

    def differ(self, name: str, text: str, *, iteration: int, advice: str) -> None:
        """Add one difference.

        Args:
            name: row of the table.
            text: what differs, and by how much.
            iteration: iteration of the difference.
            advice: key of the advice for the user.
        """
        order = list(self._rows).index(name)
        self._rows[name].differing += 1
        self._differences.append(_Difference(iteration, order, len(self._differences), text, advice))

    def measure(self, name: str, relative: float) -> None:
        """Record the relative size of a difference, whether or not it is within the limits."""
        row = self._rows[name]
        row.worst = max(row.worst, relative if math.isfinite(relative) else 0.0)

    def answer(self) -> Answer:
        """Return the table without empty rows, and the first difference."""
        first = min(self._differences, default=None)
        advice = "" if first is None else _ADVICE[first.advice].format(before=first.iteration - 1)
        rows = [row for row in self._rows.values() if row.compared or row.skipped or row.differing]
        checks = tuple(
            Check(
                name=row.name,
                compared="" if row.skipped else pluralize(row.compared, row.unit.removesuffix("s"), row.unit),
                differing=f"{row.differing:,} of them" if row.differing else "",
                worst=f"{row.worst:.1e} relative" if row.worst else "",
                skipped=row.skipped,
            )
            for row in rows
        )
        return Answer(checks=checks, first="" if first is None else first.text, explanation=advice)

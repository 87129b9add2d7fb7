"""Write metrics as JSON lines, which `neox-report` reads.

There is one line per `write`: `{"iteration": 100, "loss/train": 2.31, ...}`. A number that is not finite is
null, and `"nonfinite": {"loss/train": "nan"}` names it. A resumed training first drops the lines after its
iteration, and skips metrics already recorded for that iteration, so that every metric is
recorded once per iteration.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from neox_config import finite_json
from neox_config.atomic import atomic_write

__all__ = ["JsonlWriter", "read_metrics"]

logger = logging.getLogger(__name__)


class JsonlWriter:
    """Appends to `metrics.jsonl`.

    Args:
        folder: created if missing.
        iteration: the training continues after this iteration. At 0, an existing file is renamed to
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
        """Append one line, without metrics that an earlier process recorded for this iteration."""
        new = {name: value for name, value in metrics.items() if (iteration, name) not in self._recorded}
        if new:
            self._file.write(finite_json.dumps({"iteration": iteration, **new}) + "\n")

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a `metrics.jsonl`, without a truncated last line.

    Damaged lines are skipped with a warning.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                continue
            record = _parse(line)
            if record is None:
                logger.warning("%s, line %d is damaged and skipped", path, number)
            else:
                yield record


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = finite_json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("iteration"), int) else None


def _keep_until(path: Path, iteration: int) -> set[tuple[int, str]]:
    """Drop later records; return the (iteration, metric) pairs recorded for the last iteration."""
    recorded = set()
    with atomic_write(path) as file:
        for record in read_metrics(path):
            if record["iteration"] <= iteration:
                file.write(finite_json.dumps(record) + "\n")
            if record["iteration"] == iteration:
                recorded |= {(iteration, name) for name in record}
    return recorded


def _move_aside(path: Path) -> None:
    number = 1
    while (older := path.with_name(f"metrics.{number}.jsonl")).exists():
        number += 1
    path.rename(older)

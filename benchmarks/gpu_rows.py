"""Timing and results that the parts of tools/gpu_minutes.py share.

A part adds a row for each figure as soon as it is measured, so that a part that fails or runs out of time
leaves what it found. Rows are a JSON file: {"rows": [{"name", "value", "unit", "expected", "note"}]}.
"""

import argparse
import gc
import itertools
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["Rows", "Timer", "parse", "release"]


class Rows:
    """Figures of one part.

    Args:
        path: the JSON file, rewritten with every row; None: rows are only printed.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []

    def add(
        self, name: str, value: float | str, unit: str = "", *, expected: str = "", note: str = ""
    ) -> None:
        """Add a figure, with the value that was expected before it was measured."""
        if isinstance(value, float) and not math.isfinite(value):
            self.fail(name, f"{value} {unit}")
            return
        self._append({"name": name, "value": value, "unit": unit, "expected": expected, "note": note})

    def skip(self, name: str, reason: str) -> None:
        """Add a figure that this machine or this PyTorch cannot give, with the reason."""
        self._without_value(name, f"not measured: {reason}")

    def fail(self, name: str, error: BaseException | str) -> None:
        """Add a figure whose measurement failed, and continue."""
        message = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        print(message, file=sys.stderr, flush=True)
        # Of a traceback, the line that names the error.
        named = re.findall(r"^[\w.]*(?:Error|Exception|Failure)\b.*", message, re.MULTILINE)
        text = named[-1] if "Traceback" in message and named else " ".join(message.split())
        self._without_value(name, f"FAILED: {text[:300]}")

    def measure(self, name: str, run: Callable[[], float], unit: str, *, expected: str = "") -> float | None:
        """Add the value that `run` returns, or its failure; None if it failed."""
        try:
            value = run()
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
            # OutOfMemoryError is a RuntimeError, and so is what torch's compiler raises.
            self.fail(name, error)
            return None
        self.add(name, value, unit, expected=expected)
        return value

    @property
    def has_failed(self) -> bool:
        """Whether a measurement failed."""
        return any(row["note"].startswith("FAILED") for row in self._rows)

    def _without_value(self, name: str, note: str) -> None:
        self._append({"name": name, "value": None, "unit": "", "expected": "", "note": note})

    def _append(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        value = row["value"]
        shown = f"{value:,.4g}" if isinstance(value, float) else value or ""
        print(f"{row['name']}: {shown} {row['unit']} {row['note']}".rstrip(), flush=True)
        if self._path is not None:
            aside = self._path.with_name(f".{self._path.name}.new")
            aside.write_text(json.dumps({"rows": self._rows}, indent=1, allow_nan=False), encoding="utf-8")
            aside.replace(self._path)


class Timer:
    """Times calls on the GPU by its events, or on the CPU by the clock.

    Args:
        device: of the tensors.
        budget_seconds: of one figure, after the warm-up.
    """

    def __init__(self, device: torch.device, *, budget_seconds: float) -> None:
        self._on_gpu = device.type == "cuda"
        self._budget = budget_seconds

    def milliseconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Return the median time of a call.

        Args:
            calls: the same work on different memory, so that a call does not find its data in the cache.
        """
        turns = itertools.cycle(calls)
        for _ in range(max(3, len(calls))):
            next(turns)()
        once = self._timed(turns, 1)[0] / 1e3
        count = int(max(3, min(200, self._budget / max(once, 1e-6))))
        return statistics.median(self._timed(turns, count))

    def _timed(self, turns: Any, count: int) -> list[float]:
        if not self._on_gpu:
            times = []
            for _ in range(count):
                began = time.perf_counter()
                next(turns)()
                times.append(1e3 * (time.perf_counter() - began))
            return times
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            next(turns)()
            event.record()
        torch.cuda.synchronize()
        return [one.elapsed_time(other) for one, other in itertools.pairwise(events)]


def release(device: torch.device) -> None:
    """Free the memory of the last figure."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def parse(description: str | None) -> tuple[argparse.Namespace, torch.device, Rows]:
    """Read the options that all parts have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="run at tiny sizes on the CPU")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("there is no GPU; --rehearse runs this script on the CPU")
    torch.manual_seed(0)
    device = torch.device("cpu" if options.rehearse else "cuda")
    name = "the CPU" if options.rehearse else torch.cuda.get_device_name()
    print(f"{name}, PyTorch {torch.__version__}", file=sys.stderr)
    return options, device, Rows(options.json)

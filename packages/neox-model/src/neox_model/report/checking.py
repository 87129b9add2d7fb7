"""Check what a record says once, when it is read, so that the page can rely on it."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["is_time", "unsound"]

_LATEST_TIME = 2.0**37
"""Seconds since 1970 that a date can still express."""
_NUMBER = (int, float)
_Shape = Mapping[str, Any]

_START: _Shape = {
    "host": str,
    "devices": int,
    "device": str,
    "layout": {"data": int, "model": int, "pipe": int},
    "packages": {},
    "code": {"commit": (str, type(None)), "sources_sha256": str},
    "config": {},
    "origins": {},
    "derived": {"precision": str, "train_batch_size": int},
    "estimate": {"memory_bytes": {"total": _NUMBER}, "parameters": int, "flops_per_iteration": _NUMBER},
}
_OPTIONAL: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("loss", "perplexity", "seconds", "limit", "grad_norm", "loss_scale"), _NUMBER),
    **dict.fromkeys(("median", "factor", "bytes", "peak_tflops"), _NUMBER),
    **dict.fromkeys(("first_sample", "last_sample", "last_iteration", "restart"), int),
    **dict.fromkeys(("ranks", "hosts"), list),
    "save": str,
    "attention": dict,
}
"""Field of events -> its types, if it is there and not null."""


def is_time(value: Any) -> bool:
    """Return whether a value is a time in seconds since 1970."""
    return isinstance(value, _NUMBER) and math.isfinite(value) and 0 <= value < _LATEST_TIME


def unsound(event: Mapping[str, Any]) -> list[str]:
    """Return the fields of an event that are missing or of another type than docs/logging.md states."""
    found = [
        name
        for name, types in _OPTIONAL.items()
        if event.get(name) is not None and not isinstance(event[name], types)
    ]
    found += [] if isinstance(event["event"], str) else ["event"]
    if event["event"] == "start":
        found += _differing(event, _START)
        found += [f"estimate.memory_bytes.{name}" for name in _not_numbers(event)]
    return found


def _differing(values: Mapping[str, Any], shape: _Shape, prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, expected in shape.items():
        value = values.get(name)
        if not isinstance(value, dict if isinstance(expected, dict) else expected):
            found.append(prefix + name)
        elif isinstance(expected, dict):
            found += _differing(value, expected, f"{prefix}{name}.")
    return found


def _not_numbers(start: Mapping[str, Any]) -> list[str]:
    estimate = start.get("estimate")
    memory = estimate.get("memory_bytes") if isinstance(estimate, dict) else None
    if not isinstance(memory, dict):
        return []
    return [name for name, value in memory.items() if not isinstance(value, _NUMBER)]

"""The kinds of events in a run's record, and how callbacks write them.

The record is `metrics.jsonl` (`writers/jsonl.py`, docs/logging.md). Every event has the fields `time`,
`attempt`, `iteration` and `event`, its kind.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from neox_model.metrics.writers.base import MetricWriter

__all__ = ["EVENT_FIELDS", "NO_EVENTS", "EventWriter", "Events"]

EVENT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "attempt": ("format", "launch"),
    "start": (
        *("restart", "host", "devices", "layout", "device", "peak_tflops", "peak_reason"),
        *("packages", "attention", "code", "config", "origins", "derived", "estimate", "last_iteration"),
        *("checkpoint", "save"),
    ),
    "evaluation": ("part", "loss", "perplexity", "seconds"),
    "save": ("seconds",),
    "save_failed": ("message",),
    "skipped": ("reason", "loss", "grad_norm", "loss_scale", "first_sample", "last_sample", "documents"),
    "spike": ("loss", "limit", "action", "first_sample", "last_sample", "documents"),
    "straggler": ("ranks", "hosts", "seconds", "median", "factor"),
    "sdc": ("message",),
    "end": ("reason", "message"),
}
"""Kind -> the fields that it may have."""


@runtime_checkable
class EventWriter(Protocol):
    """A metric writer that also records events."""

    def event(self, kind: str, iteration: int, content: Mapping[str, Any]) -> None:
        """Record an event, visible to readers when this returns."""


class Events:
    """Records events with every writer that can.

    Args:
        writers: the run's metric writers; empty on all ranks except one.
    """

    def __init__(self, writers: Iterable[MetricWriter] = ()) -> None:
        self._writers = [writer for writer in writers if isinstance(writer, EventWriter)]

    @property
    def are_recorded(self) -> bool:
        """A writer records them."""
        return bool(self._writers)

    def record(self, kind: str, iteration: int, **content: Any) -> None:
        """Record an event.

        Args:
            kind: one of `EVENT_FIELDS`.
            iteration: number of finished iterations.
            content: its fields, as plain values.

        Raises:
            ValueError: the kind or a field is not declared.
        """
        unknown = content.keys() - set(EVENT_FIELDS.get(kind, ()))
        if kind not in EVENT_FIELDS or unknown:
            raise ValueError(f"event {kind} {sorted(unknown)} is not declared; add it to EVENT_FIELDS")
        for writer in self._writers:
            writer.event(kind, iteration, content)


NO_EVENTS = Events()
"""Records nothing."""

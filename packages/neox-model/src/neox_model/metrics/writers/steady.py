"""Continue training if metrics cannot be written."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from neox_model.metrics.events import EventWriter
from neox_model.metrics.writers.base import MetricWriter
from neox_model.metrics.writers.monitor import MonitorWriter

__all__ = ["SteadyWriter"]

logger = logging.getLogger(__name__)


class SteadyWriter:
    """A writer that logs failures instead of raising, because metrics must not end a long run.

    A full disk raises an OSError, a service or its package anything. The first failure after an interval
    without one is logged; metrics may be missing.

    Args:
        inner: the writer; closed with this one.
    """

    def __init__(self, inner: MetricWriter) -> None:
        self._inner = inner
        self._name = type(inner.inner if isinstance(inner, MonitorWriter) else inner).__name__
        self._has_failed = False
        self._has_failed_since_flush = False
        # `Events` records with those that have this method.
        if isinstance(inner, EventWriter):
            self.event: Callable[..., object] = partial(self._attempt, inner.event)

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Write metrics, if possible."""
        self._attempt(self._inner.write, metrics, iteration)

    def flush(self) -> None:
        """Flush the writer, if possible."""
        if self._attempt(self._inner.flush) and not self._has_failed_since_flush:
            self._has_failed = False
        self._has_failed_since_flush = False

    def close(self) -> None:
        """Close the writer."""
        self._attempt(self._inner.close)

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> bool:
        try:
            action(*arguments)
        except Exception as error:  # Logged; the packages of services raise errors of any class.
            if not self._has_failed:
                logger.error(
                    "%s cannot write metrics, training continues: %s: %s",
                    self._name,
                    type(error).__name__,
                    error,
                )
            self._has_failed = self._has_failed_since_flush = True
            return False
        return True

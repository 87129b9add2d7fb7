"""Keeps a training alive when its metrics cannot be written."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from neox_model.metrics.writers.base import MetricWriter

__all__ = ["SteadyWriter"]

logger = logging.getLogger(__name__)


class SteadyWriter:
    """A writer whose failures are errors in the log: a full disk must not end a long training.

    The first failure is told, and those that follow a success; numbers may be missing from the record.

    Args:
        inner: does the writing; closed with this one.
    """

    def __init__(self, inner: MetricWriter) -> None:
        self._inner = inner
        self._has_failed = False

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Record these numbers, if that is possible."""
        self._attempt(self._inner.write, metrics, iteration)

    def flush(self) -> None:
        """Make what is written visible to readers, if that is possible."""
        if self._attempt(self._inner.flush):
            self._has_failed = False

    def close(self) -> None:
        """Let go of files and connections."""
        self._attempt(self._inner.close)

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> bool:
        try:
            action(*arguments)
        except OSError as error:
            if not self._has_failed:
                logger.error("%s loses metrics, training goes on: %s", type(self._inner).__name__, error)
            self._has_failed = True
            return False
        return True

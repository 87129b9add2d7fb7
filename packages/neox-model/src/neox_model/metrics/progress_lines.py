"""Log from time to time how much of a piece of work is done, so that no log is silent for minutes."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from neox_config.formats import format_duration

__all__ = ["ProgressLines"]

logger = logging.getLogger(__name__)

_FIRST_SECONDS = 3.0
_INTERVAL_SECONDS = 10.0

_Item = TypeVar("_Item")


class ProgressLines:
    """Logs how much is done, first after three seconds, then every ten.

    Args:
        what: what is done, as in "validation".
        unit: what is counted, in the plural.
        total: the whole amount; None: it is not known.
        clock: returns the time in seconds.
    """

    def __init__(
        self, what: str, unit: str, total: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._unit, self._total, self._clock = what, unit, total, clock
        self._of = "of"
        self._done = 0
        self._started = clock()
        self._next = self._started + _FIRST_SECONDS

    def expect(self, total: int, *, is_estimate: bool) -> None:
        """Set the whole amount, which is found out during the work."""
        self._total, self._of = total, "of about" if is_estimate else "of"

    def add(self, amount: int = 1) -> None:
        """Count what has newly been done; log a line if it is time for one and something is left."""
        self._done += amount
        now = self._clock()
        if now < self._next or not self._done or self._done == self._total:
            return
        self._next = now + _INTERVAL_SECONDS
        if self._total is None:
            logger.info("%s: %s %s", self._what, f"{self._done:,}", self._unit)
            return
        left = (now - self._started) * (self._total / self._done - 1)
        logger.info(
            "%s: %s %s %s %s, %s left",
            self._what,
            f"{self._done:,}",
            self._of,
            f"{self._total:,}",
            self._unit,
            format_duration(left),
        )

    def track(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield the items, each of which is done when the next one is requested."""
        for item in items:
            yield item
            self.add()

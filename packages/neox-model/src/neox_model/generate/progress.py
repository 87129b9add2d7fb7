"""Log the progress of a generation with many prompts, and what it has done at its end."""

import logging
import time
from collections.abc import Callable

from neox_config.pluralize import pluralize

__all__ = ["Progress"]

logger = logging.getLogger(__name__)

_INTERVAL_SECONDS = 10.0
# Of prompts that are too long; the end counts all of them.
_MOST_NAMED = 10


class Progress:
    """Counts results, and logs every ten seconds how many there are.

    Args:
        prompts: number of prompts.
        place: describes a prompt, given its position from 0, as in "line 3".
        clock: returns the time in seconds.
    """

    def __init__(
        self, prompts: int, place: Callable[[int], str], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._prompts, self._place, self._clock = prompts, place, clock
        self.results = self._tokens = self._refused = self._decoded = 0
        self._started = self._logged = clock()

    def add(self, tokens: int, refusal: str | None) -> None:
        """Count the result of the next prompt.

        Args:
            tokens: number of generated tokens.
            refusal: why the prompt has no text, if it is too long.
        """
        if refusal is not None:
            self._refused += 1
            if self._refused <= _MOST_NAMED:
                logger.warning("%s has no text: %s", self._place(self.results), refusal)
        self.results += 1
        self._tokens += tokens

    def note(self, new_tokens: int) -> None:
        """Count tokens that a step of this replica has decoded, of texts that may not be complete yet."""
        self._decoded += new_tokens
        now = self._clock()
        if now - self._logged >= _INTERVAL_SECONDS:
            self._logged = now
            logger.info(
                "%s of %s results; this replica has decoded %s, %.1f tokens/s",
                f"{self.results:,}",
                f"{self._prompts:,}",
                pluralize(self._decoded, "token"),
                self._decoded / (now - self._started),
            )

    def finish(self) -> None:
        """Log what was done."""
        seconds = self._clock() - self._started
        refused = f"; {self._refused:,} too long" if self._refused else ""
        logger.info(
            "%s in, %s out%s; %s in %.1f s (%.1f tokens/s)",
            pluralize(self._prompts, "prompt"),
            pluralize(self.results, "result"),
            refused,
            pluralize(self._tokens, "token"),
            seconds,
            self._tokens / seconds if seconds else 0.0,
        )

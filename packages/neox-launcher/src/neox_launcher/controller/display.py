"""What a launch shows of its run besides the output: its result at the end, or a live line as well."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from neox_config.errors import LaunchError
from neox_launcher.controller.terminal import print_message
from neox_launcher.protocol.eta import Eta

if TYPE_CHECKING:
    from neox_launcher.controller.live_display import LiveDisplay

__all__ = ["Display", "open_display", "refuse_terminal"]


class Display:
    """Draws nothing; the interface through which a launch reports what it is doing, and a record of it.

    Args:
        clock: returns seconds since a fixed time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pace = Eta(clock)
        self.seconds_per_iteration: float | None = None
        """In the latest attempt, evaluations and saves included; None if not known."""
        self.num_attempts = 0
        """Number of times that the workers were started."""
        self.num_warnings = 0
        self.highest_iteration = 0
        """Highest completed iteration of all attempts."""
        self.metrics: Mapping[str, float] = {}
        """Latest metrics of rank 0, possibly of an earlier attempt."""
        self._warnings_before = 0

    def show_phase(self, phase: str) -> None:
        """Show what the launch is doing; empty while the workers report by themselves."""

    def show_request(self, request: str) -> None:
        """Show a request to the workers, such as `stopping`, until the next attempt."""

    def show_status(self, status: Mapping[str, Any]) -> None:
        """Show what rank 0 reports: `neox_launcher.worker.reporting.Progress.describe`."""
        iteration = status.get("iteration")
        self.note_iteration(iteration or 0)
        if iteration is not None and not status.get("phase"):
            self.seconds_per_iteration = self._pace.note(iteration)
        self.metrics = {**self.metrics, **status.get("metrics", {})}
        self.num_warnings = self._warnings_before + int(status.get("warnings", 0))

    def begin_attempt(self) -> None:
        """Show a new attempt: the workers are started, possibly again."""
        self.num_attempts += 1
        self._pace = Eta(self._clock)
        self._warnings_before = self.num_warnings

    def note_iteration(self, iteration: int) -> None:
        """Note the last iteration of an attempt that has ended, which rank 0 may not have reported."""
        self.highest_iteration = max(self.highest_iteration, iteration)

    def print(self, screen: Callable[[int], Any]) -> None:
        """Print a text.

        Args:
            screen: returns the text, of rich, for a width in columns; plain output has no limit.
        """
        print_message(screen(sys.maxsize).plain + "\n")

    def close(self) -> None:
        """Remove what is drawn."""


def open_display(mode: str) -> "LiveDisplay | None":
    """Return a live display on standard error, or None for plain lines.

    Args:
        mode: `terminal` of the configuration.

    Raises:
        LaunchError: a live line is requested, but standard error cannot show it.
    """
    reason = refuse_terminal(mode)
    if reason is not None:
        raise LaunchError(reason)
    if mode == "plain" or _cannot_draw(sys.stderr) is not None:
        return None
    with suppress(OSError):  # Not the terminal that controls this process, so no shell waits there.
        if os.tcgetpgrp(sys.stderr.fileno()) != os.getpgrp():
            return None
    # Importing rich takes longer than the rest of a launch that shows no line.
    from neox_launcher.controller.live_display import LiveDisplay

    return LiveDisplay(sys.stderr)


def refuse_terminal(mode: str) -> str | None:
    """Return why a run with this `terminal` is refused here; None if it is not."""
    reason = _cannot_draw(sys.stderr) if mode == "live" else None
    return None if reason is None else f"terminal is live, but {reason}; set terminal: auto"


def _cannot_draw(stream: TextIO | None) -> str | None:
    """Return why a stream can show no live line; None if it can."""
    try:
        is_terminal = stream is not None and os.isatty(stream.fileno())
    except (OSError, ValueError):
        is_terminal = False
    if not is_terminal:
        return "standard error is not a terminal"
    if os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return f"the terminal cannot move its cursor (TERM is {os.environ.get('TERM', '') or 'not set'})"
    return None

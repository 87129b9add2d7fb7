"""The live line of a training and the screens around it, on a terminal."""

import io
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from neox_launcher.controller.display import Display
from neox_launcher.controller.live_line import LiveState, render_line
from neox_launcher.controller.terminal import draw, print_message, start_drawing, stop_drawing
from neox_launcher.protocol.background import start_thread
from neox_launcher.worker.reporting import FINISHING

__all__ = ["LiveDisplay"]

_TICK_SECONDS = 0.25
_COLUMNS = 80


class LiveDisplay(Display):
    """Draws the live line on a terminal, four times a second.

    Args:
        stream: the terminal.
        clock: returns seconds since a fixed time.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._stream = stream
        has_colors = not os.environ.get("NO_COLOR")
        # Turns styles into escape sequences, according to TERM and COLORTERM.
        self._console = Console(
            color_system="auto" if has_colors else None,
            file=io.StringIO(),
            force_terminal=True,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
        )
        self._state = LiveState(since=clock())
        self._has_closed = threading.Event()
        start_drawing(stream, self._render, has_colors=has_colors)
        self._ticker = start_thread(self._tick, "live-line")

    def show_phase(self, phase: str) -> None:
        """Show what the launch is doing; empty while the workers report by themselves."""
        self._state = replace(
            self._state, phase=phase, since=self._clock(), iteration=None, seconds_per_iteration=None
        )

    def show_request(self, request: str) -> None:
        """Show a request to the workers, such as `stopping`, until the next attempt."""
        self._state = replace(self._state, request=request)

    def show_status(self, status: Mapping[str, Any]) -> None:
        """Show what rank 0 reports."""
        super().show_status(status)
        now, before = self._clock(), self._state
        phase, iteration = str(status.get("phase", "")), status.get("iteration")
        is_training = iteration is not None and not phase
        seconds = self.seconds_per_iteration if is_training else before.seconds_per_iteration
        self._state = replace(
            before,
            phase=phase,
            since=before.since if phase == before.phase else now,
            iteration=iteration,
            last_iteration=status.get("last_iteration"),
            metrics={**before.metrics, **status.get("metrics", {})},
            seconds_per_iteration=None if phase == FINISHING else seconds,
            reported=before.reported if iteration == before.iteration else now,
        )

    def begin_attempt(self) -> None:
        """Show a new attempt, without the results of the one before."""
        super().begin_attempt()
        self._state = replace(self._state, request="", metrics={})

    def close(self) -> None:
        """Remove the line; may be called again."""
        if not self._has_closed.is_set():
            self._has_closed.set()
            self._ticker.join()
            stop_drawing()

    def print(self, screen: Callable[[int], Text]) -> None:
        """Print a text above the line.

        Args:
            screen: returns the text for a width in columns.
        """
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns or _COLUMNS
        except OSError:
            columns = _COLUMNS
        print_message(self._as_output(screen(columns)) + "\n")

    def _render(self, width: int) -> str:
        return self._as_output(render_line(self._state, now=self._clock(), width=width))

    def _as_output(self, text: Text) -> str:
        """Return a text with the colours that the terminal has; none if NO_COLOR is set."""
        with self._console.capture() as captured:
            self._console.print(text, end="", soft_wrap=True)
        return captured.get()

    def _tick(self) -> None:
        while not self._has_closed.wait(_TICK_SECONDS):
            draw()

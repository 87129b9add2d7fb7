"""The live line of a run and the screens around it, on a terminal."""

import io
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from neox_launcher.controller.display import Display
from neox_launcher.controller.live_line import LiveState, render_line
from neox_launcher.controller.terminal import Line, print_message, start_drawing, stop_drawing
from neox_launcher.worker.reporting import FINISHING

__all__ = ["LiveDisplay"]

_HOLD_BYTES = 64 * 1024


class _Terminal(io.StringIO):
    """Passes text on to a function that writes bytes."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        super().__init__()
        self._write = write

    def write(self, text: str) -> int:
        self._write(text.encode(errors="replace"))
        return len(text)


class _LiveLine(Line):
    """Draws a line below all other output of a terminal, four times a second.

    The thread that writes to the terminal calls it. Lines of other output appear when they are complete; of a
    line that its writer overwrites (a progress bar), the last state.

    Args:
        file: writes to the terminal.
        render: returns the line for a width in columns; called in another thread.
    """

    def __init__(self, file: TextIO, render: Callable[[int], Text]) -> None:
        self._console = console = _console(file)
        # The last column stays free: terminals differ in what follows a character there.
        self._live = Live(
            console=console,
            get_renderable=lambda: render(console.width - 1),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._rests: dict[object, bytes] = {}

    def start(self) -> None:
        # Drawn at once: else the first refresh could come between the erasure of nothing and other output.
        self._live.start(refresh=True)
        # A process that is killed leaves a usable terminal.
        self._console.show_cursor()

    def write(self, source: object, data: bytes) -> None:
        *lines, rest = (self._rests.pop(source, b"") + data).split(b"\n")
        if len(rest) > _HOLD_BYTES:
            lines, rest = [*lines, rest], b""
        if rest:
            # What is overwritten later is never shown; a return at the end has overwritten nothing yet.
            self._rests[source] = rest[max(0, rest.rstrip(b"\r").rfind(b"\r")) :]
        if lines:
            text = b"\n".join(line.rstrip(b"\r") for line in lines).decode(errors="backslashreplace")
            self._console.print(Text.from_ansi(text), soft_wrap=True)

    def stop(self) -> None:
        for source in [source for source, rest in self._rests.items() if rest.strip(b"\r")]:
            self.write(source, b"\n")
        self._live.stop()


class LiveDisplay(Display):
    """Draws the live line on a terminal.

    Args:
        stream: the terminal.
        clock: returns seconds since a fixed time.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._stream = stream
        self._state = LiveState(since=clock())
        start_drawing(stream, lambda write: _LiveLine(_Terminal(write), self._render))

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
        stop_drawing()

    def print(self, screen: Callable[[int], Text]) -> None:
        """Print a text above the line.

        Args:
            screen: returns the text for a width in columns.
        """
        console = _console(io.StringIO())
        with console.capture() as captured:
            console.print(screen(console.width), soft_wrap=True)
        print_message(captured.get())

    def _render(self, width: int) -> Text:
        try:
            return render_line(self._state, now=self._clock(), width=width)
        except Exception as error:  # The line is decoration: its errors must not end the job.
            return Text(f"the live line cannot be drawn: {type(error).__name__}: {error}")


def _console(file: TextIO) -> Console:
    """Return a console with the width and colours of the terminal; without colours if NO_COLOR is set."""
    # rich prefers an exported COLUMNS, which stays as it was when the window is resized.
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return Console(
        _environ=environment,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        file=file,
        force_terminal=True,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )

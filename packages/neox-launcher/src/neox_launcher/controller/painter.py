"""Keeps a line at the bottom of a terminal, below everything else that is written there.

A painter only computes what to write; the thread that writes to the terminal calls it. The cursor stays
visible and at the beginning of the line, so that a process that is killed leaves a usable terminal.
"""

import os
import re
from collections.abc import Callable, Hashable

__all__ = ["Painter", "readable"]

# To the end of the screen: a terminal that became narrower shows the line in several rows.
_ERASE = b"\r\x1b[J"
_HOLD_BYTES = 64 * 1024
# Escape sequences (ECMA-48: control sequences, strings and single functions), then other control characters.
_CONTROL = re.compile(
    r"(?P<color>\x1b\[[0-9;:]*m)"
    r"|(?P<escape>\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"
    r"|\x1b[ -/]*[0-~])"
    r"|(?P<single>[\x00-\x08\x0a-\x1f\x7f-\x9f])"
)


class Painter:
    """Draws a line, and puts other output above it.

    Lines of other output appear when they are complete; of a line that its writer overwrites (a progress
    bar), the last state.

    Args:
        descriptor: the terminal.
        render: returns the line for a width in columns, with colours, without an end of line.
        has_colors: leave the colours of other output as they are, instead of removing them.
    """

    def __init__(self, descriptor: int, render: Callable[[int], str], *, has_colors: bool = True) -> None:
        self.descriptor, self._render, self._has_colors = descriptor, render, has_colors
        self._shown = b""
        self._rests: dict[Hashable, bytes] = {}
        self._has_failed = self.is_paused = False
        """Set while the terminal belongs to another program; everything else is still written."""

    def paint(self, source: Hashable, data: bytes) -> bytes:
        """Return what to write to the terminal to show other output above the line.

        Args:
            source: where the output comes from; lines of several sources do not mix.
            data: the output; empty to draw the line again.
        """
        lines, frame = self._complete(source, data), b""
        try:
            frame = self._frame()
        except Exception as error:
            # The line is decoration: its errors must neither end the job nor hold back other output.
            lines += (
                "neox-launch: warning: the live line has ended, the job continues: "
                f"{type(error).__name__}: {error}\n"
            ).encode(errors="backslashreplace")
            self._has_failed = True
        if not lines and frame == self._shown:
            return b""
        erase = _ERASE if self._shown and _is_in_foreground(self.descriptor) else b""
        self._shown = frame
        return erase + lines + frame

    def finish(self) -> bytes:
        """Return what to write to remove the line, with all other output that was held back."""
        erase = _ERASE if self._shown and _is_in_foreground(self.descriptor) else b""
        held = b"".join(self._readable(rest) for rest in self._rests.values() if rest.strip(b"\r"))
        self._shown, self._rests = b"", {}
        return erase + held

    def _frame(self) -> bytes:
        """Return the line, with the cursor back at its beginning; empty if it cannot be drawn now."""
        if self.is_paused or self._has_failed or not _is_in_foreground(self.descriptor):
            return b""
        try:
            width = os.get_terminal_size(self.descriptor).columns
        except OSError:
            return b""  # The terminal is gone.
        # A terminal without a known size reports 0. The last column stays free: terminals differ in what
        # follows a character there.
        line = self._render((width or 80) - 1)
        return line.encode("utf-8", errors="replace") + b"\r" if line else b""

    def _complete(self, source: Hashable, data: bytes) -> bytes:
        """Return the lines that this output completes, and hold the rest back."""
        if not data:
            return b""
        *lines, rest = (self._rests.pop(source, b"") + data).split(b"\n")
        if len(rest) > _HOLD_BYTES:
            lines, rest = [*lines, rest], b""
        if rest:
            # What is overwritten later is never shown; a return at the end has overwritten nothing yet.
            self._rests[source] = rest[max(0, rest.rstrip(b"\r").rfind(b"\r")) :]
        return b"".join(map(self._readable, lines))

    def _readable(self, line: bytes) -> bytes:
        return readable(line, has_colors=self._has_colors) + b"\n"


def readable(line: bytes, *, has_colors: bool = True) -> bytes:
    r"""Return a line of output without what could move the cursor or change the terminal, except colours.

    Escape sequences are removed, other control characters and invalid bytes are shown as `\x07`.

    Args:
        line: the line, without its end.
        has_colors: keep the colours.
    """
    text = line.decode("utf-8", errors="backslashreplace").rstrip("\r")
    text = text[text.rfind("\r") + 1 :]

    def replacement(found: re.Match[str]) -> str:
        if found["single"] is not None:
            return f"\\x{ord(found['single']):02x}"
        return found[0] if found["color"] is not None and has_colors else ""

    shown = _CONTROL.sub(replacement, text)
    return (shown + "\x1b[0m" if "\x1b" in shown else shown).encode("utf-8", errors="backslashreplace")


def _is_in_foreground(descriptor: int) -> bool:
    """Return whether this process may draw: another job of the shell may have the terminal (bg, &)."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return True  # Not the terminal that controls this process, so no shell waits there.

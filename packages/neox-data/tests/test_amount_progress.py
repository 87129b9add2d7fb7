import contextlib
import io
import os
import pty

import pytest

from neox_data.amount_progress import Counts, report_progress
from support.refusals import shows


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    stream = io.StringIO()
    with report_progress(log_interval=100, stream=stream) as report:
        for documents in (50, 100, 150, 250):
            report(Counts(documents=documents, tokens=10, num_bytes=10, fraction=documents / 1000))
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["100 documents (10%)", "250 documents (25%)"]
    assert all(word in lines[0] for word in ("documents/s", "MB/s", "tokens/s", "left"))


def read_to_the_end(master: int) -> str:
    """Return everything written to a pseudo-terminal; reading gives pieces and ends with an error."""
    pieces = []
    with contextlib.suppress(OSError):
        while piece := os.read(master, 100_000):
            pieces.append(piece)
    os.close(master)
    return b"".join(pieces).decode()


def test_without_an_interval_nothing_is_shown() -> None:
    stream = io.StringIO()
    with report_progress(log_interval=None, stream=stream) as report:
        report(Counts(documents=10**6, fraction=0.5))
    assert stream.getvalue() == ""


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    master, slave = pty.openpty()
    with open(slave, "w") as stream, report_progress(log_interval=1, stream=stream) as report:
        report(Counts(documents=1234, tokens=50_000, num_bytes=10_000_000, fraction=0.5, seconds=100))
    shown = read_to_the_end(master)
    assert "50%" in shown
    assert shows(shown, "12 documents/s", "0.1 MB/s", "500 tokens/s", "1:40")
    assert "\x1b[38" in shown


def test_without_colour_there_is_a_bar_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    master, slave = pty.openpty()
    with open(slave, "w") as stream, report_progress(log_interval=1, stream=stream) as report:
        report(Counts(documents=1234, fraction=0.5, seconds=100))
    shown = read_to_the_end(master)
    assert "50%" in shown
    assert "\x1b[3" not in shown.replace("\x1b[3m", "")


@pytest.mark.parametrize("terminal", ["", "dumb", "unknown"])
def test_a_terminal_that_cannot_draw_a_line_again_gets_lines(
    terminal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", terminal)
    master, slave = pty.openpty()
    with open(slave, "w") as stream, report_progress(log_interval=1, stream=stream) as report:
        report(Counts(documents=1234, fraction=0.5, seconds=100))
    shown = read_to_the_end(master)
    assert shown.startswith("1,234 documents (50%)")
    assert "\x1b" not in shown


def test_rates_and_the_time_left() -> None:
    counts = Counts(documents=1000, tokens=50_000, num_bytes=3_000_000, fraction=0.01, seconds=100)
    assert counts.rates().split() == "10 documents/s 0.0 MB/s 500 tokens/s 2:45:00 left".split()

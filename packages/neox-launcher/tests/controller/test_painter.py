"""Other output appears whole and in order above the live line, and cannot move the cursor."""

import os
import random

import pytest

from neox_launcher.controller import painter as painting
from neox_launcher.controller.painter import Painter, readable

LINES = ["first line", "", "二番目", "x" * 500, "\x1b[31mred\x1b[0m", "last"]
SHOWN = ["first line", "", "二番目", "x" * 500, "red", "last"]
HOSTILE = {
    b"up\x1b[5Aside": "upside",
    b"clear\x1b[2J\x1b[Hed": "cleared",
    b"title\x1b]0;mine\x07d": "titled",
    b"title\x1b]0;mine\x1b\\d": "titled",
    b"device\x1bP1$r0m\x1b\\s": "devices",
    b"full\x1bcreset": "fullreset",
    b"alternate\x1b[?1049h\x1b[?25l": "alternate",
    b"bell\x07, back\x08, \x7f": "bell\\x07, back\\x08, \\x7f",
    b"vertical\x0b\x0c": "vertical\\x0b\\x0c",
    "eight bits\x9b5A\x85".encode(): "eight bits\\x9b5A\\x85",
    b"cut off\x1b": "cut off\\x1b",
    b"cut off\x1b[": "cut off",
    b"invalid \xff\xfe": "invalid \\xff\\xfe",
    b" 10%\r 20%\r100%": "100%",
    b"of windows\r": "of windows",
    b"tab\tbed": "tab\tbed",
}


@pytest.fixture
def terminal(open_terminal):
    return open_terminal(40)[1]


@pytest.mark.parametrize("seed", range(20))
def test_lines_appear_whole_above_the_line_however_they_arrive(terminal, screen, seed):
    draw, frames = random.Random(seed), iter(range(10_000))
    painter = Painter(terminal, lambda width: f"frame {next(frames) // 3}")
    for data in (text.encode() + b"\n" for text in LINES):
        while data:
            size = draw.randrange(1, 20)
            screen.feed(painter.paint(1, data[:size]))
            data = data[size:]
            if draw.random() < 0.3:
                screen.feed(painter.paint(1, b""))
            assert screen.column == 0
            assert screen.lines[-1].startswith("frame ")
    screen.feed(painter.finish())
    assert screen.lines == [*SHOWN, ""]


def test_two_streams_do_not_mix_in_one_line(terminal, screen):
    painter = Painter(terminal, lambda width: "line")
    for source, data in ((1, b"from "), (2, b"warning: "), (1, b"stdout\n"), (2, b"disk\n")):
        screen.feed(painter.paint(source, data))
    assert screen.lines == ["from stdout", "warning: disk", "line"]


@pytest.mark.parametrize("line", HOSTILE)
def test_output_cannot_move_the_cursor(terminal, screen, line):
    painter = Painter(terminal, lambda width: "line")
    screen.feed(painter.paint(1, b""))
    screen.feed(painter.paint(1, line + b"\nnext\n"))
    assert screen.lines == [HOSTILE[line], "next", "line"]


def test_colours_end_with_their_line():
    assert readable(b"\x1b[1;31mred") == b"\x1b[1;31mred\x1b[0m"


def test_a_line_without_end_is_not_held_forever(terminal, screen):
    painter = Painter(terminal, lambda width: "line")
    for _ in range(70):
        screen.feed(painter.paint(1, b"x" * 1000))
    screen.feed(painter.finish())
    assert sum(map(len, screen.lines)) == 70_000


def test_an_unchanged_line_is_not_written_again(terminal):
    painter = Painter(terminal, lambda width: "line")
    assert [painter.paint(1, b"") for _ in range(2)] == [b"line\r", b""]


def test_the_line_follows_the_width_and_leaves_the_last_column_free(open_terminal):
    widths = []
    for columns in (20, 80, 300, 0):
        painter = Painter(open_terminal(columns)[1], lambda width: widths.append(width) or "line")
        painter.paint(1, b"")
    assert widths == [19, 79, 299, 79]


def test_a_paused_line_is_removed_and_other_output_still_appears(terminal, screen):
    painter = Painter(terminal, lambda width: "line")
    screen.feed(painter.paint(1, b""))
    painter.is_paused = True
    screen.feed(painter.paint(1, b""))
    assert screen.lines == [""]
    screen.feed(painter.paint(1, b"other\n"))
    painter.is_paused = False
    screen.feed(painter.paint(1, b""))
    assert screen.lines == ["other", "line"]


def test_a_background_job_draws_nothing_and_leaves_the_shell_alone(terminal, monkeypatch):
    painter = Painter(terminal, lambda width: "line")
    painter.paint(1, b"")
    monkeypatch.setattr(painting, "_is_in_foreground", lambda descriptor: False)
    assert painter.paint(1, b"other\n") == b"other\n"
    assert painter.finish() == b""


def test_a_terminal_that_is_gone_draws_nothing():
    reading, writing = os.pipe()
    painter = Painter(writing, lambda width: "line")
    assert painter.paint(1, b"other\n") == b"other\n"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    "pieces",
    [
        (b"saving 100%\r", b"\n"),
        (b"saving 100%\r\r", b"\r\n"),
        (b" 10%\rsaving 100%\r", b"\n"),
        (b"saving 100%\r",),
    ],
)
def test_a_line_that_ends_with_a_return_is_not_lost(terminal, screen, pieces):
    painter = Painter(terminal, lambda width: "line")
    for data in pieces:
        screen.feed(painter.paint(1, data))
    screen.feed(painter.finish())
    assert screen.lines == ["saving 100%", ""]


def test_a_bar_that_returns_after_each_state_is_not_shown_before_its_end(terminal, screen):
    painter = Painter(terminal, lambda width: "line")
    for data in (b" 1%\r", b" 2%\r", b"100%\r"):
        screen.feed(painter.paint(1, data))
        assert screen.lines == ["line"]
    screen.feed(painter.paint(1, b"\nnext\n"))
    assert screen.lines == ["100%", "next", "line"]


def test_colours_are_removed_where_they_are_not_wanted(terminal, screen):
    painter = Painter(terminal, lambda width: "line", has_colors=False)
    painted = painter.paint(1, b"\x1b[1;31mred\x1b[0m\n")
    assert painted == b"red\nline\r"


def test_a_line_that_cannot_be_rendered_ends_with_one_warning_and_output_goes_on(terminal, screen):
    def render(width):
        raise TypeError("no number")

    painter = Painter(terminal, render)
    for data in (b"first\n", b"second\n"):
        screen.feed(painter.paint(1, data))
    warning = "neox-launch: warning: the live line has ended, the job continues: TypeError: no number"
    assert screen.lines == ["first", warning, "second", ""]

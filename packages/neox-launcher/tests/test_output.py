"""What workers print goes where it is wanted, and the last of it is kept."""

import pytest

from neox_launcher.output import OutputPipes
from neox_launcher.seat import output_pipe


@pytest.fixture
def open_pipes(tmp_path):
    """Pipes of ranks 0 and 1, rank 0 shown; what was shown."""
    shown, opened = [], []

    def start(**changes):
        settings = {"shown": [0], "by_lines": False, "files": None} | changes
        pipes = OutputPipes(tmp_path, [0, 1], show=lambda *what: shown.append(what), **settings)
        pipes.seen = shown
        opened.append(pipes)
        return pipes

    yield start
    for pipes in opened:
        pipes.close()


def write(folder, rank, stream, data):
    with output_pipe(folder, rank, stream).open("wb", buffering=0) as pipe:
        pipe.write(data)


def read_all(pipes):
    for descriptor in pipes.descriptors:
        pipes.read(descriptor)


def test_what_is_shown_passes_as_it_comes(open_pipes, tmp_path):
    pipes = open_pipes()
    write(tmp_path, 0, "stdout", b"50 %\r")
    write(tmp_path, 0, "stderr", b"\xff")
    write(tmp_path, 1, "stdout", b"unseen\n")
    read_all(pipes)
    assert pipes.seen == [(0, "stdout", b"50 %\r"), (0, "stderr", b"\xff")]
    assert pipes.unseen(0) == ""
    assert pipes.unseen(1) == "unseen"


def test_the_lines_of_several_ranks_do_not_mix(open_pipes, tmp_path):
    pipes = open_pipes(shown=[0, 1], by_lines=True)
    write(tmp_path, 0, "stdout", b"one\ntw")
    write(tmp_path, 1, "stdout", b"three")
    read_all(pipes)
    write(tmp_path, 0, "stdout", b"o\nrest")
    pipes.drain()
    assert pipes.seen == [
        (0, "stdout", b"one\n"),
        (0, "stdout", b"two\n"),
        (0, "stdout", b"rest"),
        (1, "stdout", b"three"),
    ]


def test_others_go_to_files_that_grow(open_pipes, tmp_path):
    files = tmp_path / "logs" / "output"
    files.mkdir(parents=True)
    (files / "rank-00001.log").write_text("before\n")
    pipes = open_pipes(files=files)
    write(tmp_path, 1, "stderr", b"now\n")
    read_all(pipes)
    assert (files / "rank-00001.log").read_text() == "before\nnow\n"
    assert not (files / "rank-00000.log").exists()


def test_only_the_last_of_much_is_kept(open_pipes, tmp_path):
    pipes = open_pipes()
    for _ in range(20):
        write(tmp_path, 1, "stdout", b"x" * 1000)
        read_all(pipes)
    write(tmp_path, 1, "stdout", b"the end\n")
    pipes.drain()
    assert len(pipes.unseen(1)) < 16_500
    assert pipes.unseen(1).endswith("xthe end")

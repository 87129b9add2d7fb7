"""Output of workers is shown or written to files, and its last lines are kept."""

import os

import pytest

from neox_launcher.agent import output
from neox_launcher.agent.output import OutputPipes
from neox_launcher.worker.bootstrap import output_pipe
from support.refusals import shows


@pytest.fixture
def open_pipes(tmp_path):
    """Pipes of ranks 0 and 1, with rank 0 shown, and the list of shown output."""
    shown, opened = [], []

    def start(**changes):
        settings = {"shown": [0], "by_lines": False, "files": None, "logged": [1]} | changes
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


def test_shown_output_is_passed_on_immediately(open_pipes, tmp_path):
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


def test_output_of_other_ranks_is_appended_to_files(open_pipes, tmp_path):
    files = tmp_path / "logs" / "output"
    files.mkdir(parents=True)
    (files / "rank-00001.log").write_text("before\n")
    pipes = open_pipes(files=files)
    write(tmp_path, 1, "stderr", b"now\n")
    read_all(pipes)
    pipes.close()
    assert (files / "rank-00001.log").read_text() == "before\nnow\n"
    assert not (files / "rank-00000.log").exists()


def test_output_can_be_both_shown_and_logged(open_pipes, tmp_path):
    pipes = open_pipes(shown=[0, 1], by_lines=True, files=tmp_path / "files", logged=[0, 1])
    write(tmp_path, 0, "stdout", b"one\ntw")
    read_all(pipes)
    write(tmp_path, 0, "stderr", b"warning\n")
    read_all(pipes)
    pipes.drain()
    pipes.close()
    assert pipes.seen == [(0, "stdout", b"one\n"), (0, "stderr", b"warning\n"), (0, "stdout", b"tw")]
    assert (tmp_path / "files" / "rank-00000.log").read_text() == "one\ntwwarning\n"


def test_only_the_end_of_long_output_is_kept(open_pipes, tmp_path):
    pipes = open_pipes()
    for _ in range(20):
        write(tmp_path, 1, "stdout", b"x" * 1000)
        read_all(pipes)
    write(tmp_path, 1, "stdout", b"the end\n")
    pipes.drain()
    assert len(pipes.unseen(1)) < 16_500
    assert pipes.unseen(1).endswith("xthe end")


@pytest.mark.parametrize("fault", ["full disk", "no folder"])
def test_a_log_file_that_cannot_be_written_is_one_warning(open_pipes, tmp_path, fault):
    files = tmp_path / "logs"
    if fault == "full disk":
        files.mkdir()
        (files / "rank-00001.log").symlink_to("/dev/full")
    else:
        files.touch()
    pipes = open_pipes(files=files)
    for _ in range(3):
        write(tmp_path, 1, "stdout", b"words\n")
        read_all(pipes)
    pipes.close()
    reason = "No space left on device" if fault == "full disk" else "File exists"
    [(rank, stream, text)] = pipes.seen
    assert (rank, stream) == (1, "stderr")
    assert shows(text.decode(), "neox-launch", f"{files}/rank-00001.log", reason)
    assert pipes.unseen(1) == "words\nwords\nwords"


def test_a_disk_that_hangs_stops_neither_workers_nor_the_agent(open_pipes, tmp_path, monkeypatch):
    files = tmp_path / "logs"
    files.mkdir()
    os.mkfifo(files / "rank-00001.log")
    # A pipe that is full and not read, as a file on a server that does not answer.
    reader = os.open(files / "rank-00001.log", os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(output, "_LOG_PATIENCE_SECONDS", 0.1)
    pipes = open_pipes(files=files)
    for _ in range(40):
        write(tmp_path, 1, "stdout", b"x" * 60_000)
        read_all(pipes)
    pipes.close()
    assert pipes.unseen(1) == "x" * 16_384
    os.close(reader)


def test_output_that_does_not_fit_is_stated_in_a_file_that_could_be_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "_LOG_LIMIT", 5)
    files = tmp_path / "logs"
    (files / "rank-00001.log").mkdir(parents=True)
    pipes = OutputPipes(
        tmp_path, [1, 2], shown=[], by_lines=False, files=files, logged=[1, 2], show=lambda *what: None
    )
    write(tmp_path, 2, "stdout", b"many words")
    read_all(pipes)
    pipes.close()
    assert (files / "rank-00002.log").read_text() == (
        "\n[neox-launch: 10 bytes of output are missing here: the disk was too slow for these ranks]\n"
    )


def test_streams_that_use_the_terminal_get_no_pipe(open_pipes, tmp_path):
    open_pipes(keeps_terminal=["stderr"])
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"rank-0.stdout", "rank-1.stdout", "rank-1.stderr"}

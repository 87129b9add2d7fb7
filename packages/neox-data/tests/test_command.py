import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from neox_data.cli import main
from neox_data.command import Command
from neox_data.preprocess.cli import main as preprocess_data
from neox_data.tokenizers.train import ended_by_ctrl_c


def test_ctrl_c_ends_uninterruptible_code() -> None:
    script = (
        "import os, signal\n"
        "from neox_data.tokenizers.train import ended_by_ctrl_c\n"
        "with ended_by_ctrl_c():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_handler_of_ctrl_c_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ended_by_ctrl_c():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (errno.EACCES, 2, "Permission denied; give another path"),
        (errno.EROFS, 2, "Read-only file system; give another path"),
        (errno.ENAMETOOLONG, 2, "File name too long; give another path"),
        (errno.EIO, 1, "Input/output error"),
    ],
)
def test_a_path_that_cannot_be_used_is_an_invalid_request(number: int, code: int, message: str) -> None:
    @click.command(cls=Command)
    def failing() -> None:
        raise OSError(number, os.strerror(number), "a/b")

    found = CliRunner().invoke(failing)
    assert (found.exit_code, found.output) == (code, f"Error: a/b: {message}\n")


@pytest.mark.parametrize(("words", "what"), [(["4 GiB"], "4 GiB"), ([], "out of memory")])
def test_too_little_memory_is_one_sentence(words: list[str], what: str) -> None:
    @click.command(cls=Command)
    def failing() -> None:
        raise MemoryError(*words)

    found = CliRunner().invoke(failing)
    assert (found.exit_code, found.output) == (1, f"Error: {what}\n")


COMMANDS = {
    "prepare": (main, "prepare", "--input", "{source}", "--output", "{output}"),
    "count": (main, "count", "--input", "{output}"),
    "train-tokenizer": (main, "train-tokenizer", "--input", "{source}", "--output", "{output}"),
    "stdlib-corpus": (main, "stdlib-corpus", "{output}"),
    "preprocess_data": (
        *(preprocess_data, "--input", "{source}", "--tokenizer-type", "CharLevelTokenizer"),
        *("--output-prefix", "{output}"),
    ),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_command_ends_with_a_traceback_for_a_path_that_cannot_be_used(
    tmp_path: Path, command: tuple[Any, ...]
) -> None:
    """A name that is too long stands for a folder without permission: root may enter every folder."""
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    places = {"source": tmp_path / "a.txt", "output": tmp_path / ("x" * 300)}
    program, *words = command
    found = CliRunner().invoke(program, [word.format(**places) for word in words])
    assert found.exit_code == 2
    assert isinstance(found.exception, SystemExit)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]

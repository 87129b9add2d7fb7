"""A real training on a terminal: the screens, the line, the same log as in a file, and commands that work."""

import fcntl
import os
import re
import shlex
import struct
import subprocess
import termios

import pytest

from support.corpus import write_corpus
from support.launches import ENVIRONMENT, LAUNCH, launch, write_job

pytestmark = pytest.mark.slow

SETTINGS = {
    "num-layers": 1,
    "hidden-size": 16,
    "num-attention-heads": 2,
    "seq-length": 16,
    "max-position-embeddings": 16,
    "train-iters": 6,
    "train-micro-batch-size-per-gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "tokenizer-type": "CharLevelTokenizer",
    "split": "8,1,1",
    "precision": "fp32",
    "log-interval": 2,
    "eval-iters": 300,  # Long enough that the live line shows it.
    "save": "saved",
    "save-interval": 100,
    "num-samples": 2,
    "text-gen-type": "unconditional",
    "use-wandb": False,
}
DRAWN = re.compile(r"([^\n\r]*)\r+\x1b\[2K")
VARYING = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|[\d,.e-]+ (tokens/s|[TG]FLOP/s|s\b)|\d+:\d\d left"
    r"|\S*indexmap\S*|logs-\w+"
)


def run_on_a_terminal(folder, *arguments, columns=100):
    """Run `neox-launch` on a terminal; return its exit code and all that was written."""
    reading, writing = os.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = os.environ | ENVIRONMENT | {"TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [LAUNCH, *arguments], cwd=folder, env=environment, preexec_fn=lambda: os.login_tty(writing)
    )
    os.close(writing)
    written = b""
    try:
        while part := os.read(reading, 65536):
            written += part
    except OSError:
        pass  # The other end is closed.
    os.close(reading)
    shown = re.sub(r"\x1b\[\?25[lh]", "", written.decode().replace("\r\n", "\n"))
    return process.wait(timeout=60), shown.replace("\n\r\x1b[1A", "\r")


def without_times(lines):
    return [VARYING.sub("#", line) for line in lines if line and "built the sample index" not in line]


def test_a_training_on_a_terminal(tmp_path):
    job = write_job(tmp_path, SETTINGS | {"data-path": write_corpus(tmp_path)})
    code, written = run_on_a_terminal(tmp_path, job.name, "--set", "log-dir=logs-shown")
    assert code == 0
    drawn = DRAWN.findall(written)
    assert all(len(frame) < 100 for frame in drawn)
    assert any("loading" in frame for frame in drawn)
    assert any("6/6 | loss" in frame for frame in drawn)
    lines = DRAWN.sub("", written).split("\n")
    assert lines[0] == "neox-launch: training job.yml"
    end = lines.index("neox-launch: finished")
    start = next(number for number, line in enumerate(lines) if line.startswith("  stop with "))
    log = lines[start + 1 : end]
    assert any("4/6 | loss" in line for line in log)
    kept = (tmp_path / "logs-shown" / "output" / "rank-00000.log").read_text()
    assert sorted(filter(None, kept.split("\n"))) == sorted(filter(None, log))
    # The same job without a terminal, from the same random seed.
    piped = launch(tmp_path, job.name, "--set", "log-dir=logs-piped", "--set", "save=again", seconds=300)
    assert piped.returncode == 0
    stderr, end_of_piped = piped.stderr.split("neox-launch: finished\n")
    assert "again/global_step6\n" in end_of_piped
    assert "neox-launch generate " in end_of_piped
    whole = stderr.split("\n") + piped.stdout.split("\n")
    whole.remove("neox-launch: starting 1 worker")
    assert without_times(log) == without_times(line.replace("again/", "saved/") for line in whole)
    rows = dict(line.strip().split("  ", 1) for line in lines[end + 1 :] if line.startswith("  "))
    assert (rows["iterations"].strip(), rows["checkpoint"].strip()) == ("6 of 6", "saved/global_step6")
    commands = [shlex.split(rows[name]) for name in ("generate", "evaluate")]
    for command in commands:
        assert command[0] == "neox-launch"
        assert launch(tmp_path, *command[1:], "--dry-run", seconds=60).returncode == 0
    assert rows["report"].strip() == "neox-report logs-shown"
    assert (tmp_path / "logs-shown" / "metrics.jsonl").exists()

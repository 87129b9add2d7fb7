"""A training killed by SIGKILL at random moments resumes from a complete checkpoint with the same losses.

The training is tiny and saves after every second iteration, so that most of its time it is saving. Half of
the kills wait until a save is under way. Dropout is on: the random generators must come back, too.
"""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from neox_config.facts.checkpoints import MANIFEST, complete_checkpoints
from neox_data.indexed import IndexedDatasetWriter
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.directory import find_latest
from neox_model.metrics.writers.jsonl import read_metrics
from support.launches import ENVIRONMENT, LAUNCH, write_job
from support.settings import SMALL_TRAINING

# An environment variable that every process of a job inherits.
MARK = "NEOX_TEST_JOB"
DEADLINE_SECONDS = 180.0
OUTPUT_CHARACTERS = 10_000


class Job:
    """A training in a separate folder, which is on the command line of each of its processes."""

    def __init__(self, folder: Path, *, iterations: int, processes: int) -> None:
        self.folder, self.iterations = folder, iterations
        self.checkpoints = folder / "checkpoints"
        folder.mkdir()
        _write_corpus(folder / "corpus")
        self.config = write_job(folder, self._settings(processes))

    def _settings(self, processes: int) -> dict[str, object]:
        return SMALL_TRAINING | {
            "data_path": str(self.folder / "corpus"),
            "train_iters": self.iterations,
            "num_gpus": processes,
            "zero_optimization": {"stage": 1},
            "precision": "bfloat16",
            "save": str(self.checkpoints),
            "load": str(self.checkpoints),
            "save_interval": 2,
            "keep_last_n_checkpoints": 3,
            "log_interval": 1,
            "log_dir": str(self.folder / "logs"),
        }

    def start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | ENVIRONMENT | {MARK: str(self.folder)}
        with (self.folder / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [LAUNCH, "--config", self.config], stdout=output, stderr=subprocess.STDOUT, env=environment
            )

    def finish(self) -> None:
        assert self.start().wait(timeout=DEADLINE_SECONDS) == 0, self.output[-3000:]

    def processes(self) -> list[int]:
        """Return the launcher, its agent and the workers: the processes that inherited this job's mark."""
        mark = os.fsencode(f"{MARK}={self.folder}\0")
        return [int(entry.name) for entry in Path("/proc").iterdir() if mark in _environment_of(entry)]

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    @property
    def losses(self) -> list[tuple[int, float]]:
        records = read_metrics(self.folder / "logs" / "metrics.jsonl")
        return [(record["iteration"], record["loss/train"]) for record in records if "loss/train" in record]

    @property
    def newest(self) -> int:
        names = [path.name for path in complete_checkpoints(self.checkpoints)]
        return max((int(name.removeprefix("global_step")) for name in names), default=0)

    @property
    def is_saving(self) -> bool:
        return self.checkpoints.is_dir() and any(self.checkpoints.glob(".*.saving"))


def _environment_of(entry: Path) -> bytes:
    try:
        return (entry / "environ").read_bytes() if entry.name.isdigit() else b""
    except OSError:  # Ended meanwhile, or not ours.
        return b""


def _write_corpus(prefix: Path) -> None:
    generator = np.random.default_rng(1)
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        for _ in range(40):
            writer.append(generator.integers(1, 512, size=100).astype(np.uint16))


def wait_until(condition: Callable[[], bool], what: str, job: Job) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen\n{job.output[-OUTPUT_CHARACTERS:]}"
        time.sleep(0.002)


def kill_once(job: Job, moment: str, chance: random.Random) -> None:
    """Start the training, kill it at such a moment, and see that all its processes end."""
    launcher = job.start()
    if moment == "starting":
        time.sleep(chance.uniform(0.0, 8.0))
    else:
        goal = job.newest + chance.randrange(2, 8)
        wait_until(lambda: job.newest >= goal or launcher.poll() is not None, f"iteration {goal}", job)
        if moment == "saving":
            wait_until(lambda: job.is_saving or launcher.poll() is not None, "a save", job)
        assert launcher.poll() is None, f"it ended by itself\n{job.output[-OUTPUT_CHARACTERS:]}"
        time.sleep(chance.uniform(0.0, 0.02))
    victims = job.processes()
    for victim in victims if chance.random() < 0.7 else chance.sample(victims, 1):
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            continue
    assert launcher.wait(timeout=DEADLINE_SECONDS) != 0
    wait_until(lambda: not job.processes(), "the end of all processes", job)


def check_newest_is_complete(job: Job) -> int:
    """Return the iteration to resume from, 0 for none; all its shards are complete."""
    folder = find_latest(job.checkpoints)
    if folder is None:
        return 0
    manifest = Manifest.read(folder)
    assert {
        path.name: path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST
    } == manifest.files
    return manifest.iteration


def kill_and_resume(
    folder: Path, *, moments: Sequence[str], iterations: int, processes: int, seed: int
) -> None:
    chance = random.Random(seed)
    undisturbed = Job(folder / "undisturbed", iterations=iterations, processes=processes)
    undisturbed.finish()
    job = Job(folder / "killed", iterations=iterations, processes=processes)
    expected = []
    for moment in moments:
        kill_once(job, moment, chance)
        expected.append(check_newest_is_complete(job))
    job.finish()
    resumed = [int(iteration) for iteration in re.findall(r"loaded \S+/\.?global_step(\d+)", job.output)]
    assert resumed[-1] == expected[-1]
    assert len(resumed) >= sum(moment != "starting" for moment in moments)
    assert [iteration for iteration, _ in job.losses] == list(range(1, iterations + 1))
    assert job.losses == undisturbed.losses


@pytest.mark.slow
def test_three_kills_leave_no_trace_in_the_losses(tmp_path):
    moments = ["saving", "training", "saving"]
    kill_and_resume(tmp_path, moments=moments, iterations=40, processes=1, seed=1)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [1])
def test_twenty_kills_leave_no_trace_in_the_losses(tmp_path, seed):
    moments = ["saving", "training", "saving", "starting"] * 5
    kill_and_resume(tmp_path, moments=moments, iterations=150, processes=2, seed=seed)

"""A run killed by SIGKILL at random moments resumes from a complete checkpoint, and trains the same.

The run is tiny and saves after every second iteration, so that most of its time it is saving. Half of
the kills wait until a save is under way. Dropout is on: the random generators must come back, too. With
asynchronous saves, processes that write are also killed alone: their training continues.
"""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from neox_config.facts.checkpoints import MANIFEST, complete_checkpoints
from neox_data.indexed import IndexedDatasetWriter
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.directory import find_latest
from neox_model.metrics.writers.jsonl import read_metrics
from support.launches import ENVIRONMENT, LAUNCH, write_job
from support.settings import SMALL_TRAINING

pytestmark = pytest.mark.slow

# An environment variable that every process of a job inherits.
MARK = "NEOX_TEST_JOB"
DEADLINE_SECONDS = 600.0
OUTPUT_CHARACTERS = 10_000
WRITER = b"neox_model.checkpoint.shard_writer\0"
WORKER = b"neox_launcher.worker.bootstrap\0"


class Job:
    """A run in a separate folder, which is on the command line of each of its processes."""

    def __init__(
        self,
        folder: Path,
        *,
        iterations: int,
        processes: int,
        saves_in_background: bool = False,
        more: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self.folder, self.iterations, self.ranks, self.more = folder, iterations, processes, more
        self.checkpoints = folder / "checkpoints"
        folder.mkdir()
        _write_corpus(folder / "corpus")
        self._given = self._settings(processes) | {"async_save": saves_in_background} | dict(more)
        self.config = write_job(folder, self._given)

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

    def change(self, settings: Mapping[str, object]) -> None:
        """Start with other settings from now on."""
        self.config = write_job(self.folder, self._given | dict(settings))

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

    def writers(self) -> list[int]:
        """Return the processes that write a shard."""
        return [each for each in self.processes() if WRITER in _command_of(each)]

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    @property
    def losses(self) -> list[tuple[int, float]]:
        records = read_metrics(self.folder / "logs" / "metrics.jsonl")
        return [(record["iteration"], record["loss/train"]) for record in records if "loss/train" in record]

    @property
    def last_tensors(self) -> dict[str, bytes]:
        """The bytes of each tensor of the last checkpoint, by shard and name."""
        folder = self.checkpoints / f"global_step{self.iterations}"
        return {
            f"{shard.name}: {name}": tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            for shard in folder.glob("*.safetensors")
            for name, tensor in load_file(shard).items()
        }

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


def _command_of(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
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


def kill(process: int) -> bool:
    """Kill a process; return False if it has ended meanwhile."""
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def kill_a_writer(job: Job, launcher: "subprocess.Popen[bytes]") -> None:
    """Kill a process that writes a shard, and wait until the run that continues has saved again."""
    failures = job.output.count("was ended by SIGKILL")
    # One may have finished its work before the signal.
    while job.output.count("was ended by SIGKILL") == failures:
        wait_until(lambda: bool(job.writers()) or launcher.poll() is not None, "a writer", job)
        assert launcher.poll() is None, f"it ended by itself\n{job.output[-OUTPUT_CHARACTERS:]}"
        if any(map(kill, job.writers()[:1])):
            wait_for_a_save(job, launcher)


def wait_for_a_save(job: Job, launcher: "subprocess.Popen[bytes]") -> None:
    """Wait until the job has saved once more."""
    before = job.newest
    wait_until(lambda: job.newest > before or launcher.poll() is not None, "another save", job)


def victims_of(
    job: Job, launcher: "subprocess.Popen[bytes]", moment: str, chance: random.Random
) -> list[int]:
    """Return the processes to kill: of some moments the moment's, otherwise mostly all, at times one."""
    victims = job.processes()
    if moment == "launcher":
        return [launcher.pid]
    if moment == "worker":
        # While the run starts, there may be none.
        return chance.sample([each for each in victims if WORKER in _command_of(each)] or victims, 1)
    return victims if moment == "all" or chance.random() < 0.7 else chance.sample(victims, 1)


def kill_once(job: Job, moment: str, chance: random.Random) -> None:
    """Start the run, kill it at such a moment, and see that all its processes end."""
    launcher = job.start()
    if moment == "starting":
        time.sleep(chance.uniform(0.0, 8.0))
    else:
        goal = job.newest + chance.randrange(2, 8)
        wait_until(lambda: job.newest >= goal or launcher.poll() is not None, f"iteration {goal}", job)
        if moment == "writer":
            kill_a_writer(job, launcher)
        if moment == "saving":
            wait_until(lambda: job.is_saving or launcher.poll() is not None, "a save", job)
        assert launcher.poll() is None, f"it ended by itself\n{job.output[-OUTPUT_CHARACTERS:]}"
        time.sleep(chance.uniform(0.0, 0.02))
    for victim in victims_of(job, launcher, moment, chance):
        kill(victim)
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


def trained_without_kills(folder: Path, *, iterations: int, processes: int, **options: Any) -> Job:
    undisturbed = Job(folder / "undisturbed", iterations=iterations, processes=processes, **options)
    undisturbed.finish()
    return undisturbed


def kill_and_resume(
    folder: Path,
    undisturbed: Job,
    *,
    moments: Sequence[str],
    seed: int,
    saves_in_background: bool = False,
    in_turn: Sequence[Mapping[str, object]] = ({},),
    largest_difference: float = 0.0,
) -> None:
    """Kill a run at such moments, of which each start has the next of some settings.

    With a largest difference, it is that of losses, and of float32 weights relative to their norms.
    """
    chance = random.Random(seed)
    iterations, processes = undisturbed.iterations, undisturbed.ranks
    job = Job(
        folder / "killed",
        iterations=iterations,
        processes=processes,
        saves_in_background=saves_in_background,
        more=undisturbed.more,
    )
    expected = []
    for number, moment in enumerate(moments):
        job.change(in_turn[number % len(in_turn)])
        kill_once(job, moment, chance)
        expected.append(check_newest_is_complete(job))
    job.change(in_turn[-1])
    job.finish()
    resumed = [int(iteration) for iteration in re.findall(r"loaded \S+/\.?global_step(\d+)", job.output)]
    assert resumed[-1] == expected[-1]
    assert len(resumed) >= sum(moment != "starting" for moment in moments)
    assert [iteration for iteration, _ in job.losses] == list(range(1, iterations + 1))
    if largest_difference:
        pairs = zip(job.losses, undisturbed.losses, strict=True)
        assert max(abs(own - expected) for (_, own), (_, expected) in pairs) < largest_difference
        for name, values in undisturbed.last_tensors.items():
            if "layers" not in name or "/" in name:
                continue
            own, expected = (np.frombuffer(each, np.float32) for each in (job.last_tensors[name], values))
            distance = np.linalg.norm(own - expected) / max(np.linalg.norm(expected), 1e-30)
            assert distance < largest_difference, (name, distance)
        return
    assert job.losses == undisturbed.losses
    assert job.last_tensors == undisturbed.last_tensors != {}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return trained_without_kills(tmp_path_factory.mktemp("alone"), iterations=50, processes=1)


def test_two_kills_leave_no_trace_in_the_losses(tmp_path, undisturbed):
    kill_and_resume(tmp_path, undisturbed, moments=["saving", "training"], seed=1)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [1])
def test_twenty_kills_leave_no_trace_in_the_losses(tmp_path, seed):
    moments = ["saving", "training", "saving", "starting"] * 5
    undisturbed = trained_without_kills(tmp_path, iterations=150, processes=2)
    kill_and_resume(tmp_path, undisturbed, moments=moments, seed=seed)


# The loss scale grows until gradients overflow: some updates are left out, which move no bias.
EXPERTS = {
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_expert_interval": 1,
    "moe_router_type": "topk",
    "moe_balance_loss": 0.1,
    "moe_balance_over": "batch",
    "moe_expert_bias": True,
    "moe_expert_bias_rate": 0.01,
    "moe_jitter_eps": 0.01,
    "gradient_accumulation_steps": 2,
    "checkpoint_activations": True,
    "expert_parallel_size": 2,
    "precision": "fp16",
    "fp16": {"initial_scale_power": 22, "loss_scale_window": 6, "hysteresis": 1},
}


def check_experts(folder: Path, *, iterations: int, moments: Sequence[str], seed: int) -> None:
    undisturbed = trained_without_kills(folder, iterations=iterations, processes=2, more=EXPERTS)
    records = read_metrics(undisturbed.folder / "logs" / "metrics.jsonl")
    skipped = [found for record in records if (found := record.get("optimizer/skipped_iterations"))]
    assert 4 < skipped[-1] < iterations / 2
    biases = [name for name in undisturbed.last_tensors if name.endswith("router/bias")]
    assert len(biases) == 2
    assert all(any(undisturbed.last_tensors[name]) for name in biases)
    kill_and_resume(folder, undisturbed, moments=moments, seed=seed)


def test_two_kills_leave_no_trace_in_experts_and_their_biases(tmp_path):
    check_experts(tmp_path, iterations=50, moments=["saving", "training"], seed=3)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [4, 5])
def test_thirty_kills_leave_no_trace_in_experts_and_their_biases(tmp_path, seed):
    """Fifteen for each seed."""
    check_experts(
        tmp_path, iterations=120, moments=["saving", "training", "worker", "all", "starting"] * 3, seed=seed
    )


def check_divided_experts(folder: Path, *, iterations: int, moments: Sequence[str], seed: int) -> None:
    """Every second start has all experts on each rank, which changes sums of gradients by rounding."""
    more = EXPERTS | {
        "precision": "fp32",
        "fp16": {},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-4}},
    }
    undisturbed = trained_without_kills(folder, iterations=iterations, processes=2, more=more)
    layouts = [{"expert_parallel_size": size} for size in (1, 2)]
    kill_and_resume(folder, undisturbed, moments=moments, seed=seed, in_turn=layouts, largest_difference=2e-3)


def test_two_kills_leave_no_trace_in_experts_that_are_divided_anew(tmp_path):
    check_divided_experts(tmp_path, iterations=50, moments=["saving", "training"], seed=6)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [7, 8])
def test_thirty_kills_leave_no_trace_in_experts_that_are_divided_anew(tmp_path, seed):
    """Fifteen for each seed."""
    moments = ["saving", "training", "worker", "all", "starting"] * 3
    check_divided_experts(tmp_path, iterations=120, moments=moments, seed=seed)


def test_kills_while_saving_in_the_background_leave_no_trace_in_the_losses(tmp_path, undisturbed):
    kill_and_resume(tmp_path, undisturbed, moments=["writer", "saving"], seed=2, saves_in_background=True)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_hundred_kills_while_saving_in_the_background_leave_no_trace_in_the_losses(tmp_path, seed):
    """Twenty for each seed."""
    undisturbed = trained_without_kills(tmp_path, iterations=250, processes=2)
    kill_and_resume(
        tmp_path,
        undisturbed,
        moments=["writer", "worker", "saving", "launcher", "all", "training", "writer", "starting"] * 2
        + ["saving", "worker", "launcher", "all"],
        seed=seed,
        saves_in_background=True,
    )


def test_a_stop_while_a_shard_is_being_written_saves_the_last_iteration(tmp_path):
    job = Job(tmp_path / "stopped", iterations=100_000, processes=1, saves_in_background=True)
    launcher = job.start()
    wait_until(lambda: job.newest >= 4 and bool(job.writers()), "a writer", job)
    for process in [launcher.pid, *job.writers()]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    assert launcher.wait(timeout=DEADLINE_SECONDS) == 143, job.output
    stopped = int(re.findall(r"stopping after iteration (\d+):", job.output)[-1])
    assert check_newest_is_complete(job) == stopped
    assert not job.is_saving
    assert "was not saved" not in job.output

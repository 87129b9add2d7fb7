"""SIGUSR1 and SIGTERM to any process of a launch save and stop; the job then resumes exactly.

Real launches of two workers on this machine. The run would take hours: what ends it is the signal.
"""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from neox_config.facts.checkpoints import complete_checkpoints
from neox_model.metrics.writers.jsonl import read_metrics
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.launches import ENVIRONMENT, LAUNCH, write_job
from support.settings import SMALL_TRAINING

pytestmark = pytest.mark.slow

DEADLINE_SECONDS = 180.0
# What each process of a launch has on its command line.
AGENT, WORKER = "-m neox_launcher.agent ", "-m neox_launcher.worker.bootstrap "
SETTINGS = SMALL_TRAINING | {
    "lr_decay_iters": 1_000,
    "num_gpus": 2,
    "train_iters": 1_000_000,
    "save_interval": 1_000_000,
    "log_interval": 1,
}


class Job:
    """A run that only a signal ends.

    Args:
        folder: gets everything.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.saved = folder, folder / "saved"
        paths = {
            "data_path": write_corpus(folder),
            "log_dir": str(folder / "logs"),
            "save": str(self.saved),
            "load": str(self.saved),
        }
        self.config = write_job(folder, SETTINGS | paths)

    def start(self, *overrides: str) -> subprocess.Popen[bytes]:
        options = [word for override in overrides for word in ("--set", override)]
        with (self.folder / "output.txt").open("wb") as output:
            return subprocess.Popen(
                [LAUNCH, "--config", self.config, *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    @property
    def losses(self) -> dict[int, float]:
        path = self.folder / "logs" / "metrics.jsonl"
        records = read_metrics(path) if path.exists() else []
        return {record["iteration"]: record["loss/train"] for record in records if "loss/train" in record}

    @property
    def checkpoints(self) -> list[int]:
        names = [path.name for path in complete_checkpoints(self.saved)]
        return sorted(int(name.removeprefix("global_step")) for name in names)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen\n{self.output}"
            time.sleep(0.02)

    def end_of(self, launcher: subprocess.Popen[bytes]) -> int:
        try:
            return launcher.wait(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            launcher.kill()
            raise AssertionError(f"it goes on\n{self.output}") from None


def processes_below(parent: int) -> dict[int, str]:
    """Return process id and command line of every descendant of a process."""
    children: dict[int, list[int]] = {}
    commands = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The kernel cuts names of processes after 15 bytes, also within a character.
            number = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            commands[int(entry.name)] = command.decode(errors="replace")
        except OSError:  # It has ended meanwhile.
            continue
        children.setdefault(number, []).append(int(entry.name))
    found, waiting = {}, [parent]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found[child] = commands[child]
            waiting.append(child)
    return found


def workers_of(launcher: int) -> list[int]:
    found = processes_below(launcher).items()
    return sorted(number for number, command in found if WORKER in command)


def victims(launcher: int, who: str) -> list[int]:
    """Return the processes that a scheduler or a person might signal."""
    below = processes_below(launcher)
    agent = [number for number, command in below.items() if AGENT in command]
    assert len(agent) == 1, below
    assert len(workers_of(launcher)) == 2, below
    return {
        "launcher": [launcher],
        "agent": agent,
        "one worker": workers_of(launcher)[:1],
        "every process": [launcher, *below],
        "every process of the host": list(below),
    }[who]


def stop(job: Job, who: str, number: signal.Signals, *, after: int) -> int:
    """Train until that many iterations are recorded, signal, and give the launcher's exit code."""
    launcher = job.start()
    job.wait_until(
        lambda: max(job.losses, default=0) >= after or launcher.poll() is not None, f"iteration {after}"
    )
    assert launcher.poll() is None, job.output
    for victim in victims(launcher.pid, who):
        os.kill(victim, number)
    return job.end_of(launcher)


def resume_by_a_launch(job: Job, override: str) -> str:
    """Return the output."""
    assert job.end_of(job.start(override)) == 0, job.output
    return job.output


def resume_in_ranks(job: Job, override: str) -> str:
    """Return the log of rank 0."""
    return run_ranks(train_on, size=2, config=str(job.config), override=override)[0]


def train_on(config: str, override: str) -> str:
    """Train with a configuration as a worker does; return what is logged."""
    from neox_config import load_config, resolve
    from neox_model.parallel.topology import create_groups
    from neox_model.train.open_run import train_in

    messages: list[str] = []
    logger = logging.getLogger("neox_model")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    train_in(create_groups(1, 1), resolve(load_config([Path(config)], overrides=[override]), devices=2))
    return "\n".join(messages)


CASES = [
    pytest.param("launcher", signal.SIGUSR1, 138, id="launcher-SIGUSR1"),
    pytest.param("agent", signal.SIGUSR1, 138, id="agent-SIGUSR1"),
    # The launcher received no signal: for it the workers have ended normally.
    pytest.param("one worker", signal.SIGUSR1, 0, id="one-worker-SIGUSR1"),
    pytest.param("every process", signal.SIGUSR1, 138, id="every-process-SIGUSR1"),
    pytest.param(
        "every process of the host", signal.SIGUSR1, 138, id="host-SIGUSR1", marks=pytest.mark.sweep
    ),
    pytest.param("every process", signal.SIGTERM, 143, id="every-process-SIGTERM"),
]


@pytest.mark.parametrize(("who", "number", "code"), CASES)
def test_a_signal_saves_the_last_iteration_and_the_job_resumes_there(tmp_path, who, number, code):
    job = Job(tmp_path)
    assert stop(job, who, number, after=3) == code, job.output
    last = max(job.losses)
    assert job.checkpoints == [last]
    assert f"{last}: {number.name} received" in job.output
    assert f"saved {job.saved}/global_step{last}:" in job.output
    stopped = job.losses
    # A launch takes longer than ranks that are forked, and one shows that a launch resumes.
    resume = resume_by_a_launch if who == "launcher" else resume_in_ranks
    assert f"loaded {job.saved}/global_step{last}" in resume(job, f"train-iters={last + 2}")
    assert job.checkpoints == [last, last + 2]
    assert sorted(job.losses) == list(range(1, last + 3))
    assert {iteration: job.losses[iteration] for iteration in stopped} == stopped


@pytest.mark.parametrize("who", ["launcher", "agent", "every process"])
def test_a_sigterm_after_a_sigusr1_is_the_same_request_and_the_checkpoint_is_kept(tmp_path, who):
    """As at the end of a Slurm job: the warning stops the run, and SIGTERM comes while it is saved."""
    job = Job(tmp_path)
    launcher = job.start()
    job.wait_until(lambda: max(job.losses, default=0) >= 3 or launcher.poll() is not None, "iteration 3")
    found = victims(launcher.pid, who)
    (agent,) = victims(launcher.pid, "agent")
    os.kill(agent, signal.SIGUSR1)
    job.wait_until(lambda: "SIGUSR1 received" in job.output, "the stop")
    for victim in found:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGTERM)
    assert job.end_of(launcher) == 138, job.output
    last = max(job.losses)
    assert job.checkpoints == [last]
    assert f"saved {job.saved}/global_step{last}:" in job.output
    assert "Traceback" not in job.output
    if who == "launcher":
        assert "SIGTERM received" in job.output


@pytest.mark.parametrize("who", ["one worker", "every process"])
def test_a_sigusr1_while_the_workers_load_ends_the_job_with_a_message(tmp_path, who):
    job = Job(tmp_path)
    launcher = job.start()
    job.wait_until(lambda: len(workers_of(launcher.pid)) == 2, "the start of the workers")
    found = victims(launcher.pid, who)
    for _ in range(2):
        for victim in found:
            # The second time some may have ended.
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGUSR1)
        time.sleep(0.1)
    code = job.end_of(launcher)
    assert code == (138 if who == "every process" else 0), job.output
    assert "Traceback" not in job.output
    assert job.losses == {}
    assert job.checkpoints == []
    assert "1: SIGUSR1 received" in job.output or (
        # They were so new that the launcher had heard of none of them.
        who == "every process" and "SIGUSR1 received" in job.output
    )


def test_a_sigusr1_to_a_launcher_that_is_still_reading_ends_it_with_a_message(tmp_path):
    job = Job(tmp_path)
    launcher = job.start()
    job.wait_until(lambda: _blocks_warning(launcher.pid), "the start of the launcher")
    launcher.send_signal(signal.SIGUSR1)
    assert job.end_of(launcher) == 138, job.output
    assert "SIGUSR1 received" in job.output
    assert job.losses == {}


def _blocks_warning(pid: int) -> bool:
    """Whether the process keeps SIGUSR1 pending, or handles it already."""
    lines = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    kept = int(lines["SigBlk"], 16) | int(lines["SigCgt"], 16)
    return bool(kept >> (signal.SIGUSR1 - 1) & 1)

"""A tiny training started by `neox-launch` from the login host of a cluster."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from neox_model.metrics.writers.jsonl import read_metrics
from support.cluster import LOGIN, Cluster, wait_until
from support.corpus import write_corpus
from support.launches import LAUNCH
from support.settings import SMALL_TRAINING

__all__ = ["Job", "Result"]

PATIENCE_SECONDS = 300.0
TRAIN: dict[str, Any] = SMALL_TRAINING | {
    "train_iters": 20,
    "zero_optimization": {"stage": 1},
    "log_interval": 1,
}
# Open MPI refuses root without these.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@dataclass(frozen=True)
class Result:
    """How a launch ended."""

    code: int
    out: str
    err: str


class Job:
    """One run in a folder that all hosts share.

    Args:
        cluster: where it runs.
        folder: gets everything.
        hosts: the lines of the hostfile.
        base: the parameters; without `data-path` there is a small corpus.
        settings: parameters that differ.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *hosts: str,
        base: Mapping[str, Any] = TRAIN,
        **settings: Any,
    ) -> None:
        self.cluster, self.folder = cluster, folder
        folder.mkdir(exist_ok=True)
        self.saved, self.logs = folder / "saved", folder / "logs"
        content = {**_with_dashes(base), "log-dir": str(self.logs)}
        if "data-path" not in base:
            content["data-path"] = write_corpus(folder)
        if hosts:
            (folder / "hosts").write_text("".join(f"{line}\n" for line in hosts))
            content["hostfile"] = str(folder / "hosts")
        content |= _with_dashes(settings)
        self.config = folder / "job.yml"
        self.config.write_text(yaml.safe_dump(content))

    def saving(self, **settings: Any) -> dict[str, Any]:
        """Return settings of a job that saves every second iteration and resumes from its checkpoint."""
        return {"save": str(self.saved), "load": str(self.saved), "save-interval": 2, **settings}

    def start(self, *options: str, before: tuple[str, ...] = (), on: str = LOGIN) -> subprocess.Popen[str]:
        """Start the launcher.

        Args:
            options: of `neox-launch`.
            before: what stands before it, as `salloc` does.
            on: the host to start it on.
        """
        command = (*before, str(LAUNCH), "--config", str(self.config), *options)
        return self.cluster.start(*command, environment=ENVIRONMENT, on=on)

    def run(self, *options: str, before: tuple[str, ...] = ()) -> Result:
        """Run the launcher to its end."""
        return self.finish(self.start(*options, before=before))

    def finish(self, launcher: subprocess.Popen[str]) -> Result:
        """Wait for a launcher, and see that it leaves nothing behind on any host."""
        try:
            out, err = launcher.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            launcher.kill()
            out, err = launcher.communicate()
            raise AssertionError(f"it did not end:\n{out}\n{err}") from None
        self.expect_nothing_left()
        return Result(launcher.returncode, out, err)

    def expect_nothing_left(self, seconds: float = 30.0) -> None:
        """No process of a launch lives on, on any host."""
        left = self.cluster.leftovers
        wait_until(lambda: not left("neox_"), f"the end of {left('neox_')}", seconds)

    def wait_for_iteration(self, iteration: int, launcher: subprocess.Popen[str]) -> None:
        """Wait until the given number of iterations is done."""

        def is_done() -> bool:
            assert launcher.poll() is None, "".join(launcher.communicate())
            return len(self.losses) >= iteration

        wait_until(is_done, f"iteration {iteration}", PATIENCE_SECONDS)

    @property
    def losses(self) -> list[float]:
        """Of every iteration, so far."""
        return [loss for _, loss in self.record]

    @property
    def record(self) -> list[tuple[int, float]]:
        """(iteration, loss) of everything that the record of metrics holds."""
        path = self.logs / "metrics.jsonl"
        if not path.exists():
            return []
        found = read_metrics(path)
        return [(record["iteration"], record["loss/train"]) for record in found if "loss/train" in record]

    def workers_on(self, name: str) -> list[int]:
        """Return the worker processes of a host, in the order of their ranks."""
        host = self.cluster.hosts[name]
        found = {_rank_of(pid): pid for pid in host.processes("neox_launcher.worker.bootstrap")}
        return [pid for _, pid in sorted(found.items())]


def _with_dashes(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in settings.items()}


def _rank_of(pid: int) -> int:
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    match = re.search(rb"(?:^|\0)RANK=(\d+)", environment)
    assert match is not None, os.fsdecode(environment)
    return int(match[1])

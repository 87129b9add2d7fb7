"""What trials found, kept in a file so that no trial is run twice."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from neox_launcher.autotuning.space import Experiment
from neox_launcher.errors import LaunchError

__all__ = ["Result", "Results", "Status", "best_of"]

Status = Literal["measured", "out of memory", "failed", "refused", "left out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a trial ended.

    Args:
        experiment: what was tried.
        status: measured, or why not.
        reason: why not, in words.
        seconds: mean time of an iteration.
        samples_per_second: of all devices.
        tflops_per_device: 10^12 operations per second, without recomputed ones.
        fingerprint: of everything that the trial was made of; a result holds for the same one alone.
        was_reused: an earlier command found it.
    """

    experiment: Experiment
    status: Status
    reason: str = ""
    seconds: float | None = None
    samples_per_second: float | None = None
    tflops_per_device: float | None = None
    fingerprint: str = ""
    was_reused: bool = False

    def merit(self, metric: str) -> float:
        """More is better; nothing is worse than what was not measured."""
        if self.seconds is None or self.samples_per_second is None or self.tflops_per_device is None:
            return float("-inf")
        merits = {
            "latency": -self.seconds,
            "throughput": self.samples_per_second,
            "flops": self.tflops_per_device,
        }
        return merits[metric]

    @property
    def is_lasting(self) -> bool:
        """Whether the same trial would end so again; a host that was lost may be back."""
        return self.status in ("measured", "out of memory")

    def as_json(self) -> dict[str, Any]:
        """For a file; `from_json` reads it."""
        content = asdict(replace(self, was_reused=False))
        del content["was_reused"]
        return {"name": self.experiment.name, "settings": self.experiment.settings, **content}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """What `as_json` wrote; KeyError or TypeError where it is something else."""
        known = {name: value for name, value in content.items() if name not in ("name", "settings")}
        return cls(**{**known, "experiment": Experiment(**known["experiment"])})


class Results:
    """The file `results.json`, by fingerprint.

    Args:
        folder: made with the first result.
        overwrite: begin anew, as if it were empty.

    Raises:
        LaunchError: it is damaged or cannot be read.
    """

    FILE = "results.json"

    def __init__(self, folder: Path, *, overwrite: bool) -> None:
        self.path = folder / self.FILE
        self._found = {} if overwrite else {result.fingerprint: result for result in _read(self.path)}

    def of(self, fingerprint: str) -> Result | None:
        """What an earlier trial found that would end so again."""
        found = self._found.get(fingerprint)
        return replace(found, was_reused=True) if found is not None and found.is_lasting else None

    def add(self, result: Result) -> None:
        """Keep a result, on the disk too.

        Raises:
            LaunchError: the file cannot be written.
        """
        self._found[result.fingerprint] = result
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        content = [one.as_json() for one in self._found.values()]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            aside.replace(self.path)
        except OSError as error:
            raise LaunchError(
                f"{self.path} cannot be written: {error.strerror}; choose another autotuning.results_dir"
            ) from error


def best_of(results: Iterable[Result], metric: str) -> Result | None:
    """The best that was measured; the first of equal ones; None when nothing was."""
    measured = [result for result in results if result.status == "measured"]
    return max(measured, key=lambda result: result.merit(metric), default=None)


def _read(path: Path) -> list[Result]:
    try:
        return [Result.from_json(content) for content in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LaunchError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LaunchError(
            f"{path} holds no results of autotuning ({type(error).__name__}); move it away, or set "
            "autotuning.overwrite: true"
        ) from error

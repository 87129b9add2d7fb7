"""Results of trials, stored in a file so that no trial is run twice."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from neox_config.atomic import atomic_write
from neox_config.errors import LaunchError
from neox_launcher.autotuning.space import Experiment

__all__ = ["Result", "Results", "Status", "best_of"]

Status = Literal["measured", "out of memory", "failed", "refused", "left out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a trial.

    Args:
        experiment: settings of the trial.
        status: `measured`, or why there is no measurement.
        reason: description of why there is no measurement.
        seconds: mean time per iteration.
        samples_per_second: throughput of all devices.
        tflops_per_device: TFLOP/s per device, without recomputation.
        fingerprint: hash of the configuration and the hosts; a result is only reused for an equal one.
        was_reused: taken from an earlier run of the command.
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
        """Return a score, larger is better; minus infinity without a measurement."""
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
        """Whether the same trial would have the same result again; a failure may be temporary."""
        return self.status in ("measured", "out of memory")

    def as_json(self) -> dict[str, Any]:
        """Return the fields for `results.json`, read by `from_json`."""
        content = asdict(replace(self, was_reused=False))
        del content["was_reused"]
        return {"name": self.experiment.name, "settings": self.experiment.settings, **content}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Read the fields written by `as_json`.

        Raises:
            KeyError: a field is missing.
            TypeError: a field is unknown.
        """
        known = {name: value for name, value in content.items() if name not in ("name", "settings")}
        return cls(**{**known, "experiment": Experiment(**known["experiment"])})


class Results:
    """The results in the file `results.json`, by fingerprint.

    Args:
        folder: folder of the file, created with the first result.
        overwrite: ignore the existing results.

    Raises:
        LaunchError: the file is damaged or cannot be read.
    """

    FILE = "results.json"

    def __init__(self, folder: Path, *, overwrite: bool) -> None:
        self.path = folder / self.FILE
        self._found = {} if overwrite else {result.fingerprint: result for result in _read(self.path)}

    def of(self, fingerprint: str) -> Result | None:
        """Return the result of an earlier equal trial if it can be reused."""
        found = self._found.get(fingerprint)
        return replace(found, was_reused=True) if found is not None and found.is_lasting else None

    def add(self, result: Result) -> None:
        """Store a result in memory and in the file.

        Raises:
            LaunchError: the file cannot be written.
        """
        self._found[result.fingerprint] = result
        content = [one.as_json() for one in self._found.values()]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path) as file:
                file.write(json.dumps(content, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise LaunchError(
                f"{self.path} cannot be written: {error.strerror}; choose another autotuning.results_dir"
            ) from error


def best_of(results: Iterable[Result], metric: str) -> Result | None:
    """Return the best measured result, the first of equal ones; None if nothing was measured."""
    measured = [result for result in results if result.status == "measured"]
    return max(measured, key=lambda result: result.merit(metric), default=None)


def _read(path: Path) -> list[Result]:
    try:
        return [Result.from_json(content) for content in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LaunchError(f"{path} cannot be read: {error.strerror}", code="not-readable") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LaunchError(
            f"{path} contains no autotuning results ({type(error).__name__}); move it, or set "
            "autotuning.overwrite: true",
            code="other-file",
        ) from error

"""One trial: a configuration of its own in `exps_dir`, a short training, and the times it wrote."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from neox_launcher.autotuning.results import Result, Status
from neox_launcher.autotuning.space import Experiment
from neox_launcher.config import NeoXConfig, Resolved
from neox_launcher.errors import ConfigError, LaunchError
from neox_launcher.outcome import Outcome
from neox_launcher.plan import LaunchPlan
from neox_launcher.terminal import tell

__all__ = ["LEFT_OUT", "StoppedError", "Trials", "describe", "fingerprint", "measure", "profiled_iterations"]

LEFT_OUT = (
    *("autotuning", "train_batch_size"),
    *("save", "load", "save_interval", "keep_last_n_checkpoints", "checkpoint", "exit_interval"),
    *("finetune", "no_load_optim", "no_load_rng", "checkpoint_validation_with_forward_pass"),
    *("tensorboard", "wandb", "comet", "csv_monitor", "tensorboard_dir"),
    *("wandb_group", "wandb_team", "wandb_project", "wandb_host"),
    *("flops_profiler", "wall_clock_breakdown", "log_param_norm", "log_optimizer_states"),
    *("curriculum_learning", "data_efficiency"),
)
"""Parameters that a trial does without: what it neither saves nor reports, and what changes its speed with
time: a curriculum's first iterations are shorter than those that have to fit."""

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|OutOfMemoryError", re.IGNORECASE)
_LONGEST_REASON = 200


class StoppedError(Exception):
    """The user or a scheduler asked for the end.

    Args:
        exit_code: what the command returns.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Trials:
    """Carries trials out, and remembers how they ended.

    Args:
        config: what the user wrote, for all that is not tried.
        plan_for: the launch of a configuration file.
        run: carries a launch out.
        earlier: an earlier result of the same trial, by fingerprint; None where there is none.
    """

    def __init__(
        self,
        config: NeoXConfig,
        *,
        plan_for: Callable[[Path], LaunchPlan],
        run: Callable[[LaunchPlan], Outcome],
        earlier: Callable[[str], Result | None],
    ) -> None:
        self._config, self._plan_for, self._run, self._earlier = config, plan_for, run, earlier
        self._folder = Path(config.autotuning.autotuning.exps_dir)

    def attempt(self, experiment: Experiment) -> Result:
        """The result of a trial, its own or that of an earlier one.

        Raises:
            StoppedError: a signal came.
            LaunchError: no trial can be started, or its times cannot be found.
        """
        folder = self._folder / experiment.name
        path = folder / "config.yml"
        _write(path, describe(self._config, experiment, log_dir=folder))
        try:
            plan = self._plan_for(path)
        except ConfigError as error:
            return Result(experiment=experiment, status="refused", reason=_first_problem(error))
        mark = fingerprint(plan, self._steps)
        return self._earlier(mark) or self._measured(experiment, plan, folder, mark)

    @property
    def _steps(self) -> tuple[int, int]:
        return profiled_iterations(self._config)

    def _measured(self, experiment: Experiment, plan: LaunchPlan, folder: Path, mark: str) -> Result:
        record = folder / "metrics.jsonl"
        record.unlink(missing_ok=True)
        outcome = self._run(plan)
        if outcome.was_stopped:
            raise StoppedError(outcome.exit_code)
        if outcome.first_failure is not None:
            text = str(outcome.first_failure)
            tell(f"\n{text}\n\n")
            status: Status = "out of memory" if _OUT_OF_MEMORY.search(text) else "failed"
            return Result(experiment=experiment, status=status, reason=_last_line(text), fingerprint=mark)
        return measure(experiment, record, self._steps, plan.resolved, mark)


def profiled_iterations(config: NeoXConfig) -> tuple[int, int]:
    """First and last iteration that count, from 1; a trial ends after the last."""
    tuning = config.autotuning.autotuning
    return max(1, tuning.start_profile_step), max(1, tuning.end_profile_step)


def describe(config: NeoXConfig, experiment: Experiment, *, log_dir: Path) -> dict[str, Any]:
    """The configuration of a trial, as its file holds it: the user's with the settings that are tried.

    Args:
        config: the user's.
        experiment: what is tried.
        log_dir: receives the times of the trial.
    """
    given = config.given()
    values = {name: value for section in given.values() for name, value in section.items()}
    values = {name: value for name, value in values.items() if name not in LEFT_OUT}
    values |= {
        "train_iters": profiled_iterations(config)[1],
        "lr_decay_iters": config.lr_schedule.lr_decay_iters or config.training.train_iters,
        "eval_iters": 0,
        "log_interval": 1,
        "log_dir": str(log_dir),
        "use_wandb": False,
    }
    for name, value in experiment.settings.items():
        block, _, last = name.rpartition(".")
        if block:
            values[block] = {**values.get(block, {}), last: value}
        else:
            values[name] = value
    return values


def fingerprint(plan: LaunchPlan, steps: tuple[int, int]) -> str:
    """The same for the same trial: configuration, devices and the iterations that count."""
    given = plan.resolved.config.given()
    given.get("logging", {}).pop("log_dir", None)
    content = {
        "config": given,
        "derived": plan.resolved.derived.model_dump(mode="json"),
        "hosts": [(host.name, host.slots) for host in plan.world.hosts],
        "gpus": plan.world.gpus,
        "bind_cores": plan.bind_cores,
        "steps": steps,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def measure(
    experiment: Experiment, record: Path, steps: tuple[int, int], resolved: Resolved, mark: str
) -> Result:
    """The rates of a trial, over all iterations that count together.

    Args:
        experiment: what was tried.
        record: the `metrics.jsonl` of the trial.
        steps: first and last iteration that count.
        resolved: what the trial ran.
        mark: its fingerprint.

    Raises:
        LaunchError: the times are not there.
    """
    times = _times(record, steps)
    wanted = steps[1] - steps[0] + 1
    if len(times) < wanted:
        raise LaunchError(
            f"{record} holds the times of {len(times)} of {wanted} iterations; autotuning.exps_dir must be a "
            "folder that the first host and this machine share"
        )
    seconds = sum(time for time, _ in times.values()) / wanted
    # All iterations have as many operations: the mean rate is the harmonic one.
    tflops = wanted / sum(1 / rate for _, rate in times.values())
    return Result(
        experiment=experiment,
        status="measured",
        seconds=seconds,
        samples_per_second=resolved.derived.train_batch_size / seconds,
        tflops_per_device=tflops,
        fingerprint=mark,
    )


def _times(record: Path, steps: tuple[int, int]) -> dict[int, tuple[float, float]]:
    """Iteration to its seconds and its TFLOP/s per device."""
    try:
        lines = record.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise LaunchError(f"{record} cannot be read: {error.strerror}") from error
    found = {}
    for metrics in _parsed(lines):
        if "time/iteration" in metrics and steps[0] <= metrics["iteration"] <= steps[1]:
            rate = metrics["throughput/tflops_per_device"]
            found[metrics["iteration"]] = (metrics["time/iteration"], rate)
    return found


def _parsed(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The records; one that is damaged is none, and its iteration will be missing."""
    for line in lines:
        with suppress(ValueError):
            yield json.loads(line)


def _write(path: Path, values: Mapping[str, Any]) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be written: {error.strerror}; choose another autotuning.exps_dir"
        ) from error


def _first_problem(error: ConfigError) -> str:
    if not error.problems:
        return _last_line(str(error))
    problem = error.problems[0]
    return (
        f"{problem.name}: {problem.value} {problem.what}"
        if problem.value
        else f"{problem.name} {problem.what}"
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_LONGEST_REASON] if lines else "it ended without a word"

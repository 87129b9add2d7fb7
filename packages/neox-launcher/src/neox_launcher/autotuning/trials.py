"""Runs one trial: writes its configuration to `exps_dir`, trains a few iterations and reads their times."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from neox_config import NeoXConfig, Resolved
from neox_config.atomic import atomic_write
from neox_config.derive.learning_rate import decay_iterations
from neox_config.errors import ConfigError, LaunchError
from neox_config.facts.records import RECORD
from neox_config.schema.config import as_written
from neox_config.spec.resolve import derived_values
from neox_launcher.autotuning.results import Result, Status
from neox_launcher.autotuning.space import Experiment
from neox_launcher.controller.terminal import print_message
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.protocol.outcome import Outcome

__all__ = ["LEFT_OUT", "StoppedError", "Trials", "describe", "fingerprint", "measure", "profiled_iterations"]

LEFT_OUT = (
    *("autotuning", "train_batch_size", "train_epochs"),
    *("save", "load", "save_interval", "save_growth", "extra_save_iters", "save_interval_minutes"),
    "async_save",
    *("keep_last_n_checkpoints", "checkpoint", "exit_interval"),
    *("checkpoint_store", "store_chunk_size"),
    *("finetune", "no_load_optim", "no_load_rng", "checkpoint_validation_with_forward_pass"),
    *("tensorboard", "wandb", "comet", "csv_monitor", "tensorboard_dir"),
    *("wandb_group", "wandb_run_name", "wandb_team", "wandb_project", "wandb_host"),
    *("flops_profiler", "wall_clock_breakdown", "log_param_norm", "log_optimizer_states"),
    *("curriculum_learning", "data_efficiency", "lr_decay_fraction", "profile", "memory_profiling"),
    *("comms_logger", "straggler_threshold", "sdc_check_interval", "log_grad_norm", "log_zero_gradients"),
    *("log_grad_pct_zeros", "load_ema", "lr_wsd_decays"),
    *("log_gradient_noise_scale", "gradient_noise_scale_n_batches", "gradient_noise_scale_cpu_offload"),
    *("on_spike", "spike_threshold", "spike_window", "spike_patience", "spike_rollback_batches"),
    *("adlr_autoresume", "adlr_autoresume_interval", "adlr_autoresume_service"),
)
"""Parameters that are removed from the configuration of a trial: checkpoints and what requires them, reports,
and curricula, whose first iterations are shorter than the largest ones."""

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|OutOfMemoryError", re.IGNORECASE)
_LONGEST_REASON = 200


class StoppedError(Exception):
    """A signal requested the stop.

    Args:
        exit_code: exit code of the command.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Trials:
    """Runs trials, unless there is an earlier result.

    Args:
        config: configuration of the user, for all settings that are not varied.
        plan_for: returns the plan of a configuration file.
        run: runs a plan.
        earlier: returns the earlier result of an equal trial by its fingerprint, or None.
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
        """Return the result of a trial, running it if there is no earlier result.

        Raises:
            StoppedError: a signal requested the stop.
            LaunchError: the trial cannot be started, or its times are missing.
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
        record = folder / RECORD
        record.unlink(missing_ok=True)
        outcome = self._run(plan)
        if outcome.was_stopped:
            raise StoppedError(outcome.exit_code)
        if outcome.first_failure is not None:
            text = str(outcome.first_failure)
            print_message(f"\n{text}\n\n")
            status: Status = "out of memory" if _OUT_OF_MEMORY.search(text) else "failed"
            return Result(experiment=experiment, status=status, reason=_last_line(text), fingerprint=mark)
        return measure(experiment, record, self._steps, plan.resolved, mark)


def profiled_iterations(config: NeoXConfig) -> tuple[int, int]:
    """Return the first and the last measured iteration, counted from 1; a trial ends after the last."""
    tuning = config.autotuning.autotuning
    return max(1, tuning.start_profile_step), max(1, tuning.end_profile_step)


def describe(config: NeoXConfig, experiment: Experiment, *, log_dir: Path) -> dict[str, Any]:
    """Return the contents of the configuration file of a trial.

    Args:
        config: configuration of the user.
        experiment: settings of the trial.
        log_dir: folder for the times of the trial.
    """
    given = config.given()
    values = {name: value for section in given.values() for name, value in section.items()}
    values = {name: value for name, value in values.items() if name not in LEFT_OUT}
    values |= {
        "train_iters": profiled_iterations(config)[1],
        "lr_decay_iters": decay_iterations(config),
        "eval_iters": 0,
        "eval_tasks": None,
        "eval_data": None,
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
    return as_written(values)


def fingerprint(plan: LaunchPlan, steps: tuple[int, int]) -> str:
    """Return a hash of the configuration, the devices and the measured iterations of a trial."""
    given = plan.resolved.config.given()
    given.get("logging", {}).pop("log_dir", None)
    content = {
        "config": given,
        "derived": derived_values(plan.resolved),
        "hosts": [(host.name, host.slots) for host in plan.world.hosts],
        "gpus": plan.world.gpus,
        "bind_cores": plan.bind_cores,
        "steps": steps,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def measure(
    experiment: Experiment, record: Path, steps: tuple[int, int], resolved: Resolved, mark: str
) -> Result:
    """Return the rates of a trial over all measured iterations.

    Args:
        experiment: settings of the trial.
        record: `metrics.jsonl` of the trial.
        steps: first and last measured iteration.
        resolved: configuration of the trial.
        mark: its fingerprint.

    Raises:
        LaunchError: times are missing.
    """
    times = _times(record, steps)
    wanted = steps[1] - steps[0] + 1
    if len(times) < wanted:
        raise LaunchError(
            f"{record} contains the times of {len(times)} of {wanted} iterations; set autotuning.exps_dir to "
            "a folder that the first host and this machine share",
            code="too-few-times",
        )
    seconds = sum(time for time, _ in times.values()) / wanted
    # All iterations have the same number of operations, so the harmonic mean of the rates is used.
    tflops = wanted / sum(1 / rate for _, rate in times.values())
    return Result(
        experiment=experiment,
        status="measured",
        seconds=seconds,
        samples_per_second=resolved.run.batch.whole / seconds,
        tflops_per_device=tflops,
        fingerprint=mark,
    )


def _times(record: Path, steps: tuple[int, int]) -> dict[int, tuple[float, float]]:
    """Return for each measured iteration its seconds and its TFLOP/s per device."""
    try:
        lines = record.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise LaunchError(f"{record} cannot be read: {error.strerror}") from error
    found = {}
    for line in lines:
        with suppress(ValueError):  # The iterations of damaged lines are missing.
            metrics = json.loads(line)
            if "time/iteration" in metrics and steps[0] <= metrics["iteration"] <= steps[1]:
                rate = metrics["throughput/tflops_per_device"]
                found[metrics["iteration"]] = (metrics["time/iteration"], rate)
    return found


def _write(path: Path, values: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            yaml.safe_dump(dict(values), file, sort_keys=False)
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
    return lines[-1][:_LONGEST_REASON] if lines else "it ended without a message"

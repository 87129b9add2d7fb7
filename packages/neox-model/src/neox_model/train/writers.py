"""Open the configured metric writers."""

import json
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from neox_config.atomic import atomic_write
from neox_config.errors import NeoXError
from neox_config.schema.sections.checkpoint import CheckpointSection
from neox_config.schema.sections.logging import LoggingSection
from neox_config.schema.sections.monitors import MonitorsSection
from neox_launcher.worker.reporting import launch_name
from neox_model.metrics.writers.base import MetricWriter
from neox_model.metrics.writers.comet import CometWriter, require_comet
from neox_model.metrics.writers.console import ConsoleWriter
from neox_model.metrics.writers.csv import CsvWriter
from neox_model.metrics.writers.jsonl import JsonlWriter
from neox_model.metrics.writers.monitor import MonitorWriter
from neox_model.metrics.writers.steady import SteadyWriter
from neox_model.metrics.writers.tensorboard import TensorBoardWriter
from neox_model.metrics.writers.wandb import WandbWriter, require_wandb
from neox_model.train.data.position import START, Position

__all__ = ["check_services", "open_writers"]

logger = logging.getLogger(__name__)


def check_services(section: LoggingSection, monitors: MonitorsSection) -> None:
    """Raise an error if an enabled service could not be used; called before the model is built.

    Raises:
        NeoXError: a package or an API key is missing.
    """
    if section.use_wandb:
        require_wandb(section.wandb_host)
    if monitors.wandb.enabled:
        require_wandb()
    if monitors.comet.enabled:
        require_comet(online=monitors.comet.online)


def open_writers(
    section: LoggingSection,
    monitors: MonitorsSection,
    checkpoint: CheckpointSection,
    *,
    last_iteration: int,
    batch: int,
    values: Mapping[str, Any],
    position: Position = START,
) -> list[MetricWriter]:
    """Open the configured writers; a failure later does not end the run.

    A run that resumes in its own folder of checkpoints continues its runs of Weights & Biases and Comet.

    Args:
        section: the writers that count iterations.
        monitors: those that count samples.
        checkpoint: folders of the checkpoints.
        last_iteration: of the run.
        batch: samples per update over all devices.
        values: the parameters of the run, for services.
        position: position in the data that the run continues from.

    Raises:
        NeoXError: a folder cannot be written, or a service refuses the run.
    """
    load, save = checkpoint.load, checkpoint.save
    adds_to_own = load is not None and save is not None and Path(load).resolve() == Path(save).resolve()
    is_resumed = adds_to_own and position != START
    runs = RunKeys(None if save is None else Path(save), is_resumed=is_resumed)
    try:
        found = [
            ConsoleWriter(last_iteration=last_iteration),
            *_loop_writers(section, position.iteration, runs, values),
            *_monitors(monitors, position, runs, values, batch=batch),
        ]
    except OSError as error:
        raise NeoXError(
            f"cannot write metrics: {error}; free disk space, or set other folders in log-dir, "
            "tensorboard-dir and the monitors' output_path"
        ) from error
    return [SteadyWriter(writer) for writer in found]


class RunKeys:
    """The keys of a run at Weights & Biases and Comet, so that a resumed run continues them.

    The file is in the folder of the checkpoints: a run that continues the checkpoints of another folder
    starts new runs, because the other run may still write to its own.

    Args:
        folder: folder of the checkpoints; None: keys are not stored.
        is_resumed: continue the recorded runs. Otherwise all runs are new.
    """

    FILE = "monitor-runs.json"

    def __init__(self, folder: Path | None, *, is_resumed: bool) -> None:
        self._path = None if folder is None else folder / self.FILE
        self._keys = self._read() if is_resumed else {}

    def __getitem__(self, service: str) -> str | None:
        """Return the key of the run to continue; None starts a new run."""
        return self._keys.get(service)

    def record(self, service: str, key: str) -> None:
        """Store the key of a run."""
        if self._keys.get(service) == key:
            return
        self._keys[service] = key
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path) as file:
                file.write(json.dumps(self._keys, allow_nan=False) + "\n")

    def _read(self) -> dict[str, str]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            keys = json.loads(self._path.read_bytes())
        except (ValueError, RecursionError):
            keys = None
        if isinstance(keys, dict) and all(isinstance(key, str) for key in keys.values()):
            return keys
        logger.warning("%s is damaged: metrics go to new runs of Weights & Biases and Comet", self._path)
        return {}


def _loop_writers(
    section: LoggingSection, iteration: int, runs: RunKeys, values: Mapping[str, Any]
) -> Iterator[MetricWriter]:
    """Yield the writers that count iterations."""
    if section.log_dir is not None:
        yield JsonlWriter(Path(section.log_dir), iteration=iteration, launch=launch_name())
    if section.tensorboard_dir is not None:
        yield TensorBoardWriter(Path(section.tensorboard_dir), iteration=iteration)
    if section.use_wandb:
        run = WandbWriter(
            run_key=runs["use_wandb"],
            project=section.wandb_project,
            entity=section.wandb_team,
            group=section.wandb_group,
            name=section.wandb_run_name,
            settings={"base_url": section.wandb_host},
            config=values,
        )
        runs.record("use_wandb", run.run_key)
        yield run


def _monitors(
    monitors: MonitorsSection, position: Position, runs: RunKeys, values: Mapping[str, Any], *, batch: int
) -> Iterator[MetricWriter]:
    """Yield the writers that count samples, as DeepSpeed's monitors do."""
    seen = position.samples
    by_samples = partial(MonitorWriter, samples=batch, before=(position.iteration, seen))
    tensorboard, csv = monitors.tensorboard, monitors.csv_monitor
    if tensorboard.enabled:
        folder = Path(tensorboard.output_path) / tensorboard.job_name
        yield by_samples(TensorBoardWriter(folder, iteration=seen))
    if csv.enabled:
        folder = Path(csv.output_path) / csv.job_name
        yield by_samples(CsvWriter(folder, step=seen))
    if monitors.wandb.enabled:
        run = WandbWriter(
            run_key=runs["wandb"],
            project=monitors.wandb.project,
            entity=monitors.wandb.team,
            group=monitors.wandb.group,
            config=values,
        )
        runs.record("wandb", run.run_key)
        yield by_samples(run)
    if monitors.comet.enabled:
        comet = monitors.comet
        # `create` asks for a new experiment at every start.
        continued = None if comet.mode == "create" else runs["comet"]
        experiment = CometWriter(
            name=comet.experiment_name,
            tags=comet.tags,
            others=comet.others,
            workspace=comet.workspace,
            project_name=comet.project,
            experiment_key=comet.experiment_key or continued,
            mode=comet.mode,
            online=comet.online,
        )
        runs.record("comet", experiment.run_key)
        yield by_samples(experiment, interval=comet.samples_log_interval)

"""Open the configured metric writers."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from neox_config.errors import NeoXError
from neox_config.schema.sections.checkpoint import CheckpointSection
from neox_config.schema.sections.logging import LoggingSection
from neox_config.schema.sections.monitors import Comet, MonitorsSection
from neox_launcher.worker.reporting import launch_name
from neox_model.metrics.runs import RunKeys
from neox_model.metrics.writers.base import MetricWriter
from neox_model.metrics.writers.comet import CometWriter, require_comet
from neox_model.metrics.writers.console import ConsoleWriter
from neox_model.metrics.writers.csv import CsvWriter
from neox_model.metrics.writers.jsonl import JsonlWriter
from neox_model.metrics.writers.monitor import MonitorWriter
from neox_model.metrics.writers.steady import steady
from neox_model.metrics.writers.tensorboard import TensorBoardWriter
from neox_model.metrics.writers.wandb import WandbWriter, require_wandb
from neox_model.train.data.position import START, Position

__all__ = ["check_services", "open_writers"]


def check_services(logging: LoggingSection, monitors: MonitorsSection) -> None:
    """Raise an error if an enabled service could not be used; called before the model is built.

    Raises:
        NeoXError: a package or an API key is missing.
    """
    if logging.use_wandb:
        require_wandb(logging.wandb_host)
    if monitors.wandb.enabled:
        require_wandb()
    if monitors.comet.enabled:
        require_comet(online=monitors.comet.online)


def open_writers(
    logging: LoggingSection,
    monitors: MonitorsSection,
    checkpoint: CheckpointSection,
    *,
    last_iteration: int,
    batch: int,
    values: Mapping[str, Any],
    position: Position = START,
) -> list[MetricWriter]:
    """Open the configured writers; a failure later does not end the training.

    A training that resumes in its own folder of checkpoints continues its runs of Weights & Biases and Comet.

    Args:
        logging: the writers that count iterations.
        monitors: those that count samples.
        checkpoint: folders of the checkpoints.
        last_iteration: of the training.
        batch: samples per update over all devices.
        values: the parameters of the training, for services.
        position: position in the data that the training continues from.

    Raises:
        NeoXError: a folder cannot be written, or a service refuses the run.
    """
    runs = _runs(checkpoint, position)
    try:
        found = [
            ConsoleWriter(last_iteration=last_iteration),
            *_loop_writers(logging, position.iteration, runs, values),
            *_monitors(monitors, position, runs, values, batch=batch),
        ]
    except OSError as error:
        raise NeoXError(
            f"cannot write metrics: {error}; free disk space, or set other folders in log-dir, "
            "tensorboard-dir and the monitors' output_path"
        ) from error
    return [steady(writer) for writer in found]


def _runs(section: CheckpointSection, position: Position) -> RunKeys:
    """Return the runs to continue: those of the checkpoints that this training continues and adds to."""
    load, save = section.load, section.save
    is_same_folder = load is not None and save is not None and Path(load).resolve() == Path(save).resolve()
    return RunKeys(None if save is None else Path(save), is_resumed=is_same_folder and position != START)


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
        yield by_samples(_comet(monitors.comet, runs), interval=monitors.comet.samples_log_interval)


def _comet(comet: Comet, runs: RunKeys) -> MetricWriter:
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
    return experiment

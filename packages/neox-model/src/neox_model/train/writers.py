"""The metric writers that a configuration asks for."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from neox_launcher.config import NeoXConfig, Resolved
from neox_launcher.errors import NeoXError
from neox_model.metrics.writers import WRITERS, MetricWriter
from neox_model.metrics.writers.monitor import MonitorWriter
from neox_model.metrics.writers.steady import SteadyWriter
from neox_model.processes import flat_values
from neox_model.train.position import START, Position

__all__ = ["open_writers"]


def open_writers(resolved: Resolved, *, position: Position = START) -> list[MetricWriter]:
    """The writers of the rank that writes, each of which survives a full disk.

    Args:
        resolved: says where metrics go.
        position: the training continues after it.

    Raises:
        NeoXError: a folder cannot be written, which at the start is not worth training on without.
    """
    try:
        found = [*_loop_writers(resolved.config, position.iteration), *_monitors(resolved, position)]
    except OSError as error:
        raise NeoXError(
            f"metrics cannot be written: {error}; make room, or name other folders in log-dir, "
            "tensorboard-dir and the monitors' output_path"
        ) from error
    return [SteadyWriter(writer) for writer in found]


def _loop_writers(config: NeoXConfig, iteration: int) -> Iterator[MetricWriter]:
    """What counts iterations."""
    section = config.logging
    yield WRITERS["console"](last_iteration=config.training.train_iters)
    if section.log_dir is not None:
        yield WRITERS["jsonl"](Path(section.log_dir), iteration=iteration)
    if section.tensorboard_dir is not None:
        yield WRITERS["tensorboard"](Path(section.tensorboard_dir), iteration=iteration)
    if section.use_wandb:
        yield WRITERS["wandb"](
            project=section.wandb_project,
            entity=section.wandb_team,
            group=section.wandb_group,
            settings={"base_url": section.wandb_host},
            config=flat_values(config),
        )


def _monitors(resolved: Resolved, position: Position) -> Iterator[MetricWriter]:
    """What counts samples, as DeepSpeed's monitors do."""
    monitors, seen = resolved.config.monitors, position.samples
    by_samples = partial(
        MonitorWriter, samples=resolved.derived.train_batch_size, before=(position.iteration, seen)
    )
    tensorboard, csv = monitors.tensorboard, monitors.csv_monitor
    if tensorboard.enabled:
        folder = Path(tensorboard.output_path) / tensorboard.job_name
        yield by_samples(WRITERS["tensorboard"](folder, iteration=seen))
    if csv.enabled:
        folder = Path(csv.output_path) / csv.job_name
        yield by_samples(WRITERS["csv"](folder, step=seen))
    if monitors.wandb.enabled:
        run = WRITERS["wandb"](
            project=monitors.wandb.project,
            entity=monitors.wandb.team,
            group=monitors.wandb.group,
            config=flat_values(resolved.config),
        )
        yield by_samples(run)
    if monitors.comet.enabled:
        yield by_samples(_comet(resolved.config), interval=monitors.comet.samples_log_interval)


def _comet(config: NeoXConfig) -> MetricWriter:
    comet = config.monitors.comet
    return WRITERS["comet"](
        name=comet.experiment_name,
        workspace=comet.workspace,
        project_name=comet.project,
        experiment_key=comet.experiment_key,
        mode=comet.mode,
        online=comet.online,
    )

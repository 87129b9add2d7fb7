"""The runs of `verify-resume`: the user's configuration with other folders and another end."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from neox_config import NeoXConfig, Resolved
from neox_config.facts.checkpoints import LATEST, checkpoint_name
from neox_config.pluralize import pluralize
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.resuming import resumed_from
from neox_launcher.protocol.kept_checkpoints import KeptCheckpoint
from neox_launcher.protocol.verification import Comparison, Recording, Side
from neox_launcher.resources.hosts import first_workers
from neox_launcher.resources.world import World

__all__ = [
    "Phase",
    "Span",
    "comparison_plan",
    "phases_of",
    "side_of",
    "titles",
]

_LOGGED_PARTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The iterations that are compared.

    Args:
        start: iteration at which the first runs start.
        middle: iteration of the interruption, from which the resumed run continues.
        end: last iteration.
    """

    start: int
    middle: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One run.

    Args:
        title: description for the user.
        plan: plan of the launch.
        folder: folder for all its files.
        last: last iteration.
    """

    title: str
    plan: LaunchPlan
    folder: Path
    last: int

    @property
    def end(self) -> Path:
        """Folder of the checkpoint of its last iteration."""
        return _end(self.folder, self.last)


def titles(span: Span, source: KeptCheckpoint | None) -> list[str]:
    """Return descriptions of the three runs."""
    origin = "new weights" if source is None else source.path.name
    return [
        f"{pluralize(span.end - span.start, 'iteration')} without interruption, from {origin}",
        f"{pluralize(span.middle - span.start, 'iteration')}, then save",
        f"{pluralize(span.end - span.middle, 'iteration')}, resumed at iteration {span.middle:,}",
    ]


def phases_of(
    plan: LaunchPlan,
    resumed: LaunchPlan,
    *,
    span: Span,
    source: KeptCheckpoint | None,
    folder: Path,
    evaluates: bool,
) -> Iterator[Phase]:
    """Yield the three runs: uninterrupted, up to the interruption, and resumed.

    Args:
        plan: plan of the user's training.
        resumed: plan of the resumed run, possibly with another layout.
        span: iterations to compare.
        source: checkpoint from which the first two resume; None to start from new weights.
        folder: folder for all files.
        evaluates: evaluate as configured.
    """
    load = None if source is None else _link_to(source.path, folder / "start")
    whole, part, rest = titles(span, source)
    for name, last, title in (("uninterrupted", span.end, whole), ("interrupted", span.middle, part)):
        own = folder / name
        config = _for_phase(plan.resolved.config, own, span=span, last=last, evaluates=evaluates)
        config = config.model_copy(update={"checkpoint": config.checkpoint.replaced(load=load)})
        snapshot = own / "middle" if last == span.end else None
        recording = _recording(plan, config, own, span.middle, snapshot)
        yield Phase(title=title, plan=recording, folder=own, last=last)
    saved = str(folder / "interrupted" / "checkpoints")
    own = folder / "resumed"
    config = _for_phase(resumed.resolved.config, own, span=span, last=span.end, evaluates=evaluates)
    recording = _recording(resumed, resumed_from(config, saved), own, span.middle, own / "middle")
    yield Phase(title=rest, plan=recording, folder=own, last=span.end)


def side_of(folder: Path, span: Span, *, last: int, has_middle: bool = True) -> Side:
    """Return the files of the run of a phase."""
    return Side(
        record=str(folder / "record"),
        middle=str(folder / "middle" / checkpoint_name(span.middle)) if has_middle else None,
        end=str(_end(folder, last)),
    )


def _end(folder: Path, last: int) -> Path:
    return folder / "checkpoints" / checkpoint_name(last)


def comparison_plan(plan: LaunchPlan, comparison: Comparison) -> LaunchPlan:
    """Return the plan of the single worker on the first host that compares the runs."""
    first = first_workers(plan.world.hosts, 1)
    logging = plan.resolved.config.logging.replaced(log_dir=None)
    return replace(
        plan,
        program="compare-trainings",
        world=World(hosts=first, gpus=plan.world.gpus),
        resolved=plan.resolved.replaced(logging=logging),
        environment={**plan.environment, **comparison.as_variables()},
        max_restarts=0,
    )


def _for_phase(config: NeoXConfig, folder: Path, *, span: Span, last: int, evaluates: bool) -> NeoXConfig:
    """Return the configuration with its outputs in `folder` and its end at iteration `last`.

    `train_iters` is unchanged, because the schedule and the order of samples depend on it. Profilers are off:
    they would write to folders of the run itself.
    """
    monitors, engine = config.monitors, config.engine
    return config.model_copy(
        update={
            "checkpoint": config.checkpoint.replaced(
                save=str(folder / "checkpoints"),
                save_interval=last,
                save_growth=None,
                extra_save_iters=None,
                save_interval_minutes=None,
                keep_last_n_checkpoints=None,
                checkpoint_store=None,
            ),
            "training": config.training.replaced(
                exit_interval=last,
                eval_iters=config.training.eval_iters if evaluates else 0,
                adlr_autoresume=False,
            ),
            "generation": config.generation.replaced(eval_tasks=None, eval_data=None),
            "logging": config.logging.replaced(
                log_dir=str(folder / "log"),
                tensorboard_dir=None,
                use_wandb=False,
                log_interval=max(1, (span.end - span.middle) // _LOGGED_PARTS),
                profile=False,
                memory_profiling=False,
            ),
            "engine": engine.replaced(
                wall_clock_breakdown=False,
                flops_profiler=engine.flops_profiler.replaced(enabled=False),
                comms_logger=engine.comms_logger.replaced(enabled=False),
            ),
            "monitors": monitors.replaced(
                tensorboard=monitors.tensorboard.replaced(enabled=False),
                wandb=monitors.wandb.replaced(enabled=False),
                comet=monitors.comet.replaced(enabled=False),
                csv_monitor=monitors.csv_monitor.replaced(enabled=False),
            ),
        }
    )


def _recording(
    plan: LaunchPlan, config: NeoXConfig, folder: Path, middle: int, snapshot: Path | None
) -> LaunchPlan:
    recording = Recording(
        folder=str(folder / "record"), iteration=middle, snapshot=None if snapshot is None else str(snapshot)
    )
    return replace(
        plan,
        resolved=Resolved.of(config, plan.resolved.sizes),
        environment={**plan.environment, **recording.as_variables()},
        max_restarts=0,
    )


def _link_to(checkpoint: Path, folder: Path) -> str:
    """Create a folder of checkpoints that contains only this one, so that no later one is loaded."""
    folder.mkdir()
    (folder / checkpoint.name).symlink_to(checkpoint, target_is_directory=True)
    (folder / LATEST).write_text(checkpoint.name + "\n", encoding="utf-8")
    return str(folder)

"""The screens before and after a run on a terminal: what will be trained, and what came out of it."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from neox_config import NeoXConfig
from neox_config.derive.objective import is_encoder, is_retrieval
from neox_config.errors import ConfigError
from neox_config.estimate import Estimate
from neox_config.estimate.resolved import estimate_resolved
from neox_config.estimate.suggest import ATTAINED_TFLOPS
from neox_config.facts.checkpoints import is_checkpoint, iteration_of
from neox_config.facts.records import OUTPUT, RECORD, output_name
from neox_config.facts.stores import is_url
from neox_config.formats import format_duration
from neox_config.pluralize import first_few, pluralize
from neox_config.read.reading import as_yaml, normal_name
from neox_config.schema.config import as_written
from neox_config.spec.recorded import latest_checkpoint
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.planning import Request
from neox_launcher.plan.resuming import PARTIAL_LOADS, latest_in, written_checkpoints
from neox_launcher.plan.usable_documents import has_evaluation
from neox_launcher.protocol.outcome import Outcome

__all__ = ["Result", "render_end", "render_start"]

Row = tuple[str, str]
_SHOWN_HOSTS = 3
_NO_LOGS = "log-dir is not set"
_LEAST_TIME_LEFT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a run, as far as the launcher knows it.

    Args:
        outcome: how the launch ended.
        metrics: latest metrics of rank 0.
        iteration: highest completed iteration of all attempts; 0 if there was none.
        seconds: duration of the launch.
        restarts: number of restarts.
        warnings: warnings that rank 0 logged.
        saved_before: name and time of each checkpoint in `save` before the launch.
        seconds_per_iteration: evaluations and saves included; None if not known.
    """

    outcome: Outcome
    metrics: Mapping[str, float]
    iteration: int
    seconds: float
    restarts: int
    warnings: int
    saved_before: Set[tuple[str, float]] = frozenset()
    seconds_per_iteration: float | None = None


def render_start(plan: LaunchPlan, *, width: int) -> Text:
    """Return what will be trained, where, how large it is, how long it takes and what is saved."""
    try:
        result, _ = estimate_resolved(plan.resolved)
    except ConfigError:
        result = None  # The vocabulary cannot be counted here; the workers may still read it.
    title = f"neox-launch: training {' + '.join(plan.resolved.config.files)}"
    return _screen(title, [row for row in _start_rows(plan, result) if row[1]], width)


def render_end(plan: LaunchPlan, request: Request, result: Result, *, width: int) -> Text:
    """Return what came out of a run, and the commands that continue from it."""
    last = plan.resolved.config.training.iterations
    is_finished = result.outcome.exit_code == 0 and result.iteration >= last
    has_failed = result.outcome.first_failure is not None
    title = "finished" if is_finished else "failed" if has_failed else "stopped"
    has_saved = _has_saved(plan, result)
    rows = [row for row in _end_rows(plan, result, has_saved=has_saved) if row[1]]
    rows += _next_rows(plan, request, result, is_finished=is_finished, has_saved=has_saved)
    return _screen(f"neox-launch: {title}", rows, width)


def _screen(title: str, rows: Sequence[Row], width: int) -> Text:
    """Return rows as lines of at most `width` columns; commands are never cut, so that they can be copied."""
    names = max(len(name) for name, _ in rows) + 2
    lines = [Text(title, "bold")]
    for name, value in rows:
        line = Text.assemble("  ", (name.ljust(names), "cyan"), value)
        if not value.startswith("neox-"):
            line.truncate(width, overflow="ellipsis")
        lines.append(line)
    lines[0].truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def _parameters(result: Estimate) -> str:
    count = f"{_count(result.total_parameters)} parameters"
    if result.active_parameters == result.total_parameters:
        return count
    return f"{count} ({_count(result.active_parameters)} active)"


def _start_rows(plan: LaunchPlan, result: Estimate | None) -> Iterator[Row]:
    config, run = plan.resolved.config, plan.resolved.run
    model, layout, batch = config.model, run.layout, run.batch
    parameters = "" if result is None else f"{_parameters(result)}: "
    yield (
        "model",
        f"{parameters}{pluralize(model.num_layers, 'layer')}, width "
        f"{model.hidden_size:,}, {pluralize(model.num_attention_heads, 'head')}",
    )
    names = [host.name for host in plan.world.hosts]
    hosts = f"{pluralize(len(names), 'host')}: {first_few(names, _SHOWN_HOSTS)}"
    device = {None: "device", 0: "CPU process"}.get(plan.world.gpus, "GPU")
    devices = pluralize(plan.world.size, device, "CPU processes" if device.endswith("s") else None)
    yield "workers", f"{devices} on {'this machine' if plan.is_local else hosts}"
    yield (
        "layout",
        f"data {layout.data} x pipe {layout.stages} x model {layout.tensor}, ZeRO stage {layout.zero}, "
        f"{run.precision.weights}",
    )
    yield (
        "batch",
        f"{batch.whole:,} x {batch.length:,} tokens = micro-batch {batch.micro} x accumulation "
        f"{batch.accumulation} x data {layout.data}",
    )
    iterations = config.training.iterations
    origin, first_iteration = _origin(plan)
    tokens = _count(iterations * batch.whole * batch.length)
    yield (
        "training",
        f"{pluralize(iterations, 'iteration')}, {tokens} tokens, optimizer {config.optimizer.optimizer.type}",
    )
    if result is None or plan.world.gpus == 0:
        yield "time", "shown after the first iterations"
    else:
        yield "time", _time(result, iterations - first_iteration)
        memory = result.memory[result.fullest_stage].total
        yield "memory", f"about {memory / 2**30:.1f} GiB per GPU"
    yield "starts from", origin
    yield "saves", _saves(config)
    yield "evaluates", _evaluates(config)
    yield "logs", _logs(config)
    yield "restarts", f"at most {plan.max_restarts}" if plan.max_restarts else ""
    yield (
        "stop with",
        "Ctrl-C: stops after this iteration or the next" + (", and saves" if config.checkpoint.save else ""),
    )


def _time(result: Estimate, iterations: int) -> str:
    seconds = iterations * result.seconds_per_iteration(ATTAINED_TFLOPS)
    return f"about {format_duration(seconds)} if every GPU attains {ATTAINED_TFLOPS:g} TFLOP/s"


def _origin(plan: LaunchPlan) -> tuple[str, int]:
    """Return in words what the run starts from, and its first iteration as far as it is known here."""
    section = plan.resolved.config.checkpoint
    if section.load is None:
        return "new weights", 0
    if is_url(section.load):
        source, iteration = f"the latest checkpoint in {section.load}", 0
    elif (found := _checkpoint_to_load(plan, section.load)) is not None:
        source, iteration = str(found), iteration_of(found.name) or 0
    else:
        return f"new weights (no checkpoint here in {section.load})", 0
    if section.finetune:
        return f"the weights of {source}, from iteration 0", 0
    source += ", without the optimizer's states" if section.no_load_optim else ""
    return source, min(iteration, plan.resolved.config.training.iterations)


def _checkpoint_to_load(plan: LaunchPlan, load: str) -> Path | None:
    name = latest_in(Path(plan.working_directory, load))
    if name is not None:
        return Path(load, name)
    return Path(load) if is_checkpoint(Path(plan.working_directory, load)) else None


def _saves(config: NeoXConfig) -> str:
    section = config.checkpoint
    if section.save is None:
        return "nothing: save is not set"
    times = [f"every {pluralize(section.save_interval, 'iteration')}"] if section.save_interval else []
    times += [f"at growing intervals (x {section.save_growth:g})"] if section.save_growth else []
    times += [f"every {section.save_interval_minutes:g} min"] if section.save_interval_minutes else []
    kept = section.keep_last_n_checkpoints
    limit = f"; last {kept} kept" if kept else ""
    return f"{section.save}: {', '.join([*times, 'at the end'])}{limit}"


def _evaluates(config: NeoXConfig) -> str:
    training, section = config.training, config.generation
    evaluated = [pluralize(training.eval_iters, "batch", "batches")] if training.eval_iters else []
    evaluated += list(section.eval_tasks or ()) + ([section.eval_data] if section.eval_data else [])
    if not evaluated:
        return ""
    return f"every {pluralize(training.eval_interval, 'iteration')} and at the end, {', '.join(evaluated)}"


def _logs(config: NeoXConfig) -> str:
    section = config.logging
    places = [f"{section.log_dir} (metrics.jsonl)"] if section.log_dir else []
    places += [f"{section.tensorboard_dir} (TensorBoard)"] if section.tensorboard_dir else []
    places += [f"W&B project {section.wandb_project}"] if section.use_wandb else []
    # A record that is only missed after the run cannot be made any more.
    places += [] if section.log_dir else [f"nothing for neox-report ({_NO_LOGS})"]
    return ", ".join(places)


def _end_rows(plan: LaunchPlan, result: Result, *, has_saved: bool) -> Iterator[Row]:
    config, metrics = plan.resolved.config, result.metrics
    log_dir, save = config.logging.log_dir, config.checkpoint.save
    yield "iterations", f"{result.iteration:,} of {config.training.iterations:,}"
    yield "last loss", f"{metrics['loss/train']:.4f} (of one iteration)" if "loss/train" in metrics else ""
    yield "validation loss", f"{metrics['loss/validation']:.4f}" if "loss/validation" in metrics else ""
    yield "duration", format_duration(result.seconds)
    if save is None:
        yield "checkpoint", "none: save is not set"
    elif (name := latest_in(Path(plan.working_directory, save))) is None:
        yield "checkpoint", f"none in {save} on this machine"
    else:
        path = Path(save, name)
        yield "checkpoint", f"{path}" if has_saved else f"none saved in this launch; {path} is older"
    yield "report", "" if log_dir else f"none: {_NO_LOGS}"
    yield "restarts", f"{result.restarts}" if result.restarts else ""
    if result.warnings:
        where = "" if log_dir is None else f" in {Path(log_dir, OUTPUT, output_name(0))}"
        lines = f'the lines of rank 0 marked "warning:" or "error:"{where}'
        yield "warnings", f"{result.warnings:,}, in {lines}"


def _has_saved(plan: LaunchPlan, result: Result) -> bool:
    """Return whether the launch saved a checkpoint from which a run can continue."""
    save = plan.resolved.config.checkpoint.save
    if save is None or latest_in(folder := Path(plan.working_directory, save)) is None:
        return False
    try:
        return bool(written_checkpoints(folder) - result.saved_before)
    except OSError:
        return False  # The file server may have ended the run.


def _next_rows(
    plan: LaunchPlan, request: Request, result: Result, *, is_finished: bool, has_saved: bool
) -> Iterator[Row]:
    """Yield commands that can be typed now, with what each does."""
    section = plan.resolved.config.checkpoint
    if not is_finished and has_saved:
        yield "resume", _command(request, settings=_resuming(plan))
    elif not is_finished:
        # The same command starts from where this launch did.
        yield "start again", _command(request, settings={})
    elif has_saved and (iterations := _within_plan(plan, result)) is not None:
        longer = {"train-iters": iterations, "override-lr-scheduler": True}
        yield "extend", _command(request, settings=_resuming(plan) | longer)
    is_same = section.load == section.save
    folder = Path(plan.working_directory, section.save or "")
    if section.save is not None and (has_saved or (is_same and latest_checkpoint(folder) is not None)):
        settings = {} if is_same else {"load": section.save}
        if not is_encoder(plan.resolved.config):
            yield "generate", _command(request, "generate", settings=settings)
        if has_evaluation(plan.resolved.config):
            yield "evaluate", _command(request, "evaluate", settings=settings)
        if is_retrieval(plan.resolved.config):
            has_index = plan.resolved.config.objective.block_data_path is not None
            index = {} if has_index else {"block-data-path": str(Path(section.save, "index"))}
            yield "index blocks", _command(request, "index-blocks", settings=settings | index)
    log_dir = plan.resolved.config.logging.log_dir
    # False also for an unreadable folder, or a file server that is down.
    if log_dir and result.iteration and os.path.isfile(Path(plan.working_directory, log_dir, RECORD)):
        yield "report", f"neox-report {shlex.quote(log_dir)}"


def _within_plan(plan: LaunchPlan, result: Result) -> int | None:
    """Return the iterations that fit into the planned time; None if hardly any of it is left.

    Only for a run from new weights: how long earlier launches took is not known.
    """
    planned = plan.resolved.config.training.planned_seconds
    if planned is None or result.saved_before or result.seconds > planned * (1 - _LEAST_TIME_LEFT):
        return None
    each = result.seconds_per_iteration or result.seconds / result.iteration
    # The next launch starts its workers as this one did.
    start = max(0.0, result.seconds - each * result.iteration)
    more = int((planned - result.seconds - start) / each)
    return result.iteration + more if more > 0 else None


def _resuming(plan: LaunchPlan) -> dict[str, str | int]:
    """Return the settings with which this run continues from its latest checkpoint in `save`."""
    config = plan.resolved.config
    section = config.checkpoint
    load: dict[str, str | int] = (
        {} if section.save is None or section.load == section.save else {"load": section.save}
    )
    partial = [name for name in PARTIAL_LOADS if name in config.sources and config.value_of(name)]
    return load | dict.fromkeys((name.replace("_", "-") for name in partial), False)


def _command(request: Request, program: str | None = None, *, settings: Mapping[str, str | int]) -> str:
    """Return the command of this launch, with another program and with other values of some parameters."""
    words = ["neox-launch", *([program] if program else []), *request.paths]
    words += ["-d", request.directory] if request.directory else []
    for override in request.overrides:
        if normal_name(override.partition("=")[0].strip()) not in map(normal_name, settings):
            words += ["--set", override]
    for name, value in as_written(settings).items():
        words += ["--set", f"{name}={as_yaml(value)}"]
    if program is None:
        words += ["--max-restarts", str(request.max_restarts)] if request.max_restarts else []
        words += ["--bind-cores"] if request.bind_cores else []
        words += ["--output", request.output] if request.output != "rank0" else []
    return shlex.join(words)


def _count(number: int) -> str:
    """Format a large number with three digits: `1.42 B`."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:,}"

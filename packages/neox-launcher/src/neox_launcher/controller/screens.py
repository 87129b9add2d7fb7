"""The screens before and after a training on a terminal: what will be trained, and what came out of it."""

import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from neox_config import NeoXConfig, load_config
from neox_config.counted import counted
from neox_config.derive.objective import is_encoder, is_retrieval
from neox_config.errors import ConfigError, NeoXError
from neox_config.estimate import Estimate
from neox_config.estimate.resolved import estimate_resolved
from neox_config.estimate.suggest import ATTAINED_TFLOPS
from neox_config.facts.checkpoints import is_checkpoint, iteration_of
from neox_config.facts.records import OUTPUT, RECORD, output_name
from neox_config.facts.stores import is_url
from neox_config.formats import format_duration
from neox_config.read.reading import as_yaml, normal_name
from neox_config.schema.config import as_written
from neox_config.spec.recorded import latest_checkpoint
from neox_launcher.plan.of_training import is_of_training
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.planning import Request
from neox_launcher.plan.preflight import has_evaluation
from neox_launcher.plan.resuming import PARTIAL_LOADS, latest_in, written_checkpoints
from neox_launcher.protocol.outcome import Outcome

__all__ = ["Result", "render_end", "render_start"]

Row = tuple[str, str]
_SHOWN_HOSTS = 3
_NO_LOGS = "log-dir is not set"
_LEAST_TIME_LEFT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a training, as far as the launcher knows it.

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
    """Return what came out of a training, and the commands that continue from it."""
    last = plan.resolved.config.training.iterations
    is_finished = result.outcome.exit_code == 0 and result.iteration >= last
    has_failed = result.outcome.first_failure is not None
    title = "finished" if is_finished else "failed" if has_failed else "stopped"
    rows = [row for row in _end_rows(plan, result) if row[1]]
    rows += _next_rows(plan, request, result, is_finished=is_finished)
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


def _start_rows(plan: LaunchPlan, result: Estimate | None) -> Iterator[Row]:
    config, run = plan.resolved.config, plan.resolved.run
    model, layout, batch = config.model, run.layout, run.batch
    parameters = "" if result is None else f"{_count(result.total_parameters)} parameters: "
    yield (
        "model",
        f"{parameters}{counted(model.num_layers, 'layer')}, width "
        f"{model.hidden_size:,}, {counted(model.num_attention_heads, 'head')}",
    )
    yield "workers", _workers(plan)
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
    tokens = _count(iterations * batch.whole * batch.length)
    yield (
        "training",
        f"{counted(iterations, 'iteration')}, {tokens} tokens, optimizer {config.optimizer.optimizer.type}",
    )
    if result is None or plan.world.gpus == 0:
        yield "time", "shown after the first iterations"
    else:
        yield "time", _time(result, iterations - _first_iteration(plan))
        yield "memory", _memory(result)
    yield "starts from", _starts_from(plan)
    yield "saves", _saves(config)
    yield "evaluates", _evaluates(config)
    yield "logs", _logs(config)
    yield "restarts", f"at most {plan.max_restarts}" if plan.max_restarts else ""
    yield (
        "stop with",
        "Ctrl-C: stops after this iteration or the next" + (", and saves" if config.checkpoint.save else ""),
    )


def _workers(plan: LaunchPlan) -> str:
    size, hosts = plan.world.size, plan.world.hosts
    device = {None: "device", 0: "CPU process"}.get(plan.world.gpus, "GPU")
    devices = f"{size:,} {device}{'' if size == 1 else 'es' if device.endswith('s') else 's'}"
    if plan.is_local:
        return f"{devices} on this machine"
    names = ", ".join(host.name for host in hosts[:_SHOWN_HOSTS])
    more = f" and {len(hosts) - _SHOWN_HOSTS:,} more" if len(hosts) > _SHOWN_HOSTS else ""
    return f"{devices} on {len(hosts):,} host{'s' if len(hosts) > 1 else ''}: {names}{more}"


def _time(result: Estimate, iterations: int) -> str:
    seconds = iterations * result.seconds_per_iteration(ATTAINED_TFLOPS)
    return f"about {format_duration(seconds)} if every GPU attains {ATTAINED_TFLOPS:g} TFLOP/s"


def _memory(result: Estimate) -> str:
    memory = result.memory[result.fullest_stage].total
    return f"about {memory / 2**30:.1f} GiB per GPU"


def _starts_from(plan: LaunchPlan) -> str:
    section = plan.resolved.config.checkpoint
    load = section.load
    if load is None:
        return "new weights"
    if is_url(load):
        source = f"the latest checkpoint in {load}"
    elif (found := _checkpoint_to_load(plan, load)) is not None:
        source = str(found)
    else:
        return f"new weights (no checkpoint here in {load})"
    if section.finetune:
        return f"the weights of {source}, from iteration 0"
    return f"{source}, without the optimizer's states" if section.no_load_optim else source


def _first_iteration(plan: LaunchPlan) -> int:
    """Return the iteration that the training continues from, as far as this machine knows it."""
    section = plan.resolved.config.checkpoint
    if section.load is None or section.finetune or is_url(section.load):
        return 0
    checkpoint = _checkpoint_to_load(plan, section.load)
    found = None if checkpoint is None else iteration_of(checkpoint.name)
    return min(found or 0, plan.resolved.config.training.iterations)


def _checkpoint_to_load(plan: LaunchPlan, load: str) -> Path | None:
    name = latest_in(Path(plan.working_directory, load))
    if name is not None:
        return Path(load, name)
    return Path(load) if is_checkpoint(Path(plan.working_directory, load)) else None


def _saves(config: NeoXConfig) -> str:
    section = config.checkpoint
    if section.save is None:
        return "nothing: save is not set"
    times = [f"every {counted(section.save_interval, 'iteration')}"] if section.save_interval else []
    times += [f"at growing intervals (x {section.save_growth:g})"] if section.save_growth else []
    times += [f"every {section.save_interval_minutes:g} min"] if section.save_interval_minutes else []
    kept = section.keep_last_n_checkpoints
    limit = f"; last {kept} kept" if kept else ""
    return f"{section.save}: {', '.join([*times, 'at the end'])}{limit}"


def _evaluates(config: NeoXConfig) -> str:
    training, section = config.training, config.generation
    evaluated = [counted(training.eval_iters, "batch", "batches")] if training.eval_iters else []
    evaluated += list(section.eval_tasks or ()) + ([section.eval_data] if section.eval_data else [])
    if not evaluated:
        return ""
    return f"every {counted(training.eval_interval, 'iteration')} and at the end, {', '.join(evaluated)}"


def _logs(config: NeoXConfig) -> str:
    section = config.logging
    places = [f"{section.log_dir} (metrics.jsonl)"] if section.log_dir else []
    places += [f"{section.tensorboard_dir} (TensorBoard)"] if section.tensorboard_dir else []
    places += [f"W&B project {section.wandb_project}"] if section.use_wandb else []
    # A record that is only missed after the training cannot be made any more.
    places += [] if section.log_dir else [f"nothing for neox-report ({_NO_LOGS})"]
    return ", ".join(places)


def _end_rows(plan: LaunchPlan, result: Result) -> Iterator[Row]:
    config, metrics = plan.resolved.config, result.metrics
    yield "iterations", f"{result.iteration:,} of {config.training.iterations:,}"
    yield "last loss", f"{metrics['loss/train']:.4f} (of one iteration)" if "loss/train" in metrics else ""
    yield "validation loss", f"{metrics['loss/validation']:.4f}" if "loss/validation" in metrics else ""
    yield "duration", format_duration(result.seconds)
    yield "checkpoint", _saved(plan, result)
    yield "report", "" if config.logging.log_dir else f"none: {_NO_LOGS}"
    yield "restarts", f"{result.restarts}" if result.restarts else ""
    yield "warnings", f"{result.warnings:,}, in {_warning_lines(config)}" if result.warnings else ""


def _warning_lines(config: NeoXConfig) -> str:
    """Return in words where the warnings of rank 0 are."""
    log_dir = config.logging.log_dir
    where = "" if log_dir is None else f" in {Path(log_dir, OUTPUT, output_name(0))}"
    return f'the lines of rank 0 marked "warning:" or "error:"{where}'


def _saved(plan: LaunchPlan, result: Result) -> str:
    save = plan.resolved.config.checkpoint.save
    if save is None:
        return "none: save is not set"
    name = latest_in(Path(plan.working_directory, save))
    if name is None:
        return f"none in {save} on this machine"
    path = str(Path(save, name))
    return path if _has_saved(plan, result) else f"none saved in this launch; {path} is older"


def _has_saved(plan: LaunchPlan, result: Result) -> bool:
    """Return whether the launch saved a checkpoint from which a training can continue."""
    save = plan.resolved.config.checkpoint.save
    if save is None or latest_in(folder := Path(plan.working_directory, save)) is None:
        return False
    try:
        return bool(written_checkpoints(folder) - result.saved_before)
    except OSError:
        return False  # The file server may have ended the training.


def _has_checkpoint(plan: LaunchPlan, folder: str) -> bool:
    """Return whether a folder has a complete checkpoint that this machine can read."""
    try:
        return not is_url(folder) and latest_checkpoint(Path(plan.working_directory, folder)) is not None
    except OSError:
        return False


def _next_rows(plan: LaunchPlan, request: Request, result: Result, *, is_finished: bool) -> Iterator[Row]:
    """Yield commands that can be typed now, with what each does."""
    section = plan.resolved.config.checkpoint
    has_saved = _has_saved(plan, result)
    if not is_finished:
        # Without a new checkpoint, the same command starts from where this launch did.
        resuming = _resuming(plan) if has_saved else {}
        again = "after the fix" if _would_repeat(result.outcome) else "start again"
        yield "resume" if has_saved else again, _command(request, settings=resuming)
    elif has_saved and (iterations := _within_plan(plan, result)) is not None:
        longer = {"train-iters": iterations, "override-lr-scheduler": True}
        yield "extend", _command(request, settings=_resuming(plan) | longer)
    is_same = section.load == section.save
    if section.save is not None and (has_saved or (is_same and _has_checkpoint(plan, section.save))):
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
    if log_dir is not None and result.iteration and _has_metrics(Path(plan.working_directory, log_dir)):
        yield "report", f"neox-report {shlex.quote(log_dir)}"


def _within_plan(plan: LaunchPlan, result: Result) -> int | None:
    """Return the iterations that fit into the planned time; None if hardly any of it is left.

    Only for a training from new weights: how long earlier launches took is not known.
    """
    planned = plan.resolved.config.training.planned_seconds
    if planned is None or result.saved_before or result.seconds > planned * (1 - _LEAST_TIME_LEFT):
        return None
    each = result.seconds_per_iteration or result.seconds / result.iteration
    # The next launch starts its workers as this one did.
    start = max(0.0, result.seconds - each * result.iteration)
    more = int((planned - result.seconds - start) / each)
    return result.iteration + more if more > 0 else None


def _would_repeat(outcome: Outcome) -> bool:
    """Return whether a training ended by an error that a worker explains, such as a wrong setting."""
    failure = outcome.first_failure
    if failure is None or failure.rank is None:
        return False
    return failure.traceback is None and not failure.unreported


def _has_metrics(folder: Path) -> bool:
    try:
        return (folder / RECORD).is_file()
    except OSError:
        return False  # An unreadable folder, or a file server that is down.


def _resuming(plan: LaunchPlan) -> dict[str, str | int]:
    """Return the settings with which this training continues from its latest checkpoint in `save`."""
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
    replaced = {normal_name(name) for name in settings}
    kept: Sequence[str] = [each for each in _in_effect(request.overrides) if _name_of(each) not in replaced]
    kept = kept if program is None else _used_by(program, request, kept)
    for override in [*kept, *(f"{name}={as_yaml(value)}" for name, value in as_written(settings).items())]:
        words += ["--set", override]
    if program is None:
        words += ["--max-restarts", str(request.max_restarts)] if request.max_restarts else []
        words += ["--bind-cores"] if request.bind_cores else []
        words += ["--output", request.output] if request.output != "rank0" else []
    return shlex.join(words)


def _in_effect(overrides: Sequence[str]) -> list[str]:
    """Return the settings without those that a later one of the same name replaces; blocks are merged."""
    last = {_name_of(each): number for number, each in enumerate(overrides)}
    return [
        each
        for number, each in enumerate(overrides)
        if last[_name_of(each)] == number or each.partition("=")[2].lstrip().startswith("{")
    ]


def _used_by(program: str, request: Request, overrides: Sequence[str]) -> Sequence[str]:
    """Return the settings that a command other than a training uses, if its configuration is valid with them.

    The files may lack what the others set.
    """
    used = [each for each in overrides if not is_of_training(_name_of(each), program)]
    try:
        load_config(request.paths, overrides=used, directory=request.directory)
    except NeoXError:
        return overrides
    return used


def _name_of(override: str) -> str:
    return normal_name(override.partition("=")[0].strip())


def _count(number: int) -> str:
    """Format a large number with three digits: `1.42 B`."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:,}"

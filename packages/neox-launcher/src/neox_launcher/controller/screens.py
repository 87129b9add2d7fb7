"""The screens before and after a training on a terminal: what will be trained, and what came out of it."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from neox_config import NeoXConfig
from neox_config.estimate import Estimate
from neox_config.estimate.resolved import estimate_resolved
from neox_config.estimate.suggest import ATTAINED_TFLOPS
from neox_config.facts.checkpoints import LATEST, complete_checkpoints
from neox_launcher.controller.live_line import LiveState, format_duration
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.planning import Request

__all__ = ["Result", "render_end", "render_start"]

Row = tuple[str, str]
_SHOWN_HOSTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a training, as far as the launcher knows it.

    Args:
        state: what the live line showed last.
        iteration: last completed iteration; 0 if there was none.
        has_failed: the training ended with an error.
        seconds: duration of the launch.
        restarts: number of restarts.
        warnings: warnings that rank 0 logged.
    """

    state: LiveState
    iteration: int
    has_failed: bool
    seconds: float
    restarts: int
    warnings: int


def render_start(plan: LaunchPlan, *, width: int) -> Text:
    """Return what will be trained, where, how large it is, how long it takes and what is saved."""
    result, _ = estimate_resolved(plan.resolved)
    title = f"neox-launch: training {' + '.join(plan.resolved.config.files)}"
    return _screen(title, [row for row in _start_rows(plan, result) if row[1]], width)


def render_end(plan: LaunchPlan, request: Request, result: Result, *, width: int) -> Text:
    """Return what came out of a training, and the commands that continue from it."""
    last = plan.resolved.config.training.train_iters
    is_finished = not result.has_failed and result.iteration >= last
    title = "finished" if is_finished else "failed" if result.has_failed else "stopped"
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


def _start_rows(plan: LaunchPlan, result: Estimate) -> Iterator[Row]:
    config, derived = plan.resolved.config, plan.resolved.derived
    model = config.model
    yield (
        "model",
        f"{_count(result.total_parameters)} parameters: {model.num_layers} layers, width "
        f"{model.hidden_size:,}, {model.num_attention_heads} heads",
    )
    yield "workers", _workers(plan)
    yield (
        "layout",
        f"data {derived.data_parallel_size} x pipe {derived.pipe_parallel_size} x model "
        f"{derived.model_parallel_size}, ZeRO stage {config.zero.zero_optimization.stage}, "
        f"{derived.precision}",
    )
    yield (
        "batch",
        f"{derived.train_batch_size:,} x {model.seq_length:,} tokens = micro-batch "
        f"{derived.micro_batch_size} x accumulation {derived.accumulation} x data "
        f"{derived.data_parallel_size}",
    )
    iterations = config.training.train_iters
    yield (
        "training",
        f"{iterations:,} iterations, {_count(iterations * result.tokens_per_iteration)} tokens, optimizer "
        f"{config.optimizer.optimizer.type}",
    )
    has_gpus = plan.world.gpus != 0
    yield "time", _time(result, iterations) if has_gpus else "shown after the first iterations"
    yield "memory", _memory(result) if has_gpus else ""
    yield "starts from", _starts_from(plan)
    yield "saves", _saves(config)
    yield "evaluates", _evaluates(config)
    yield "logs", _logs(config)
    yield "restarts", f"at most {plan.max_restarts}" if plan.max_restarts else ""
    yield "stop with", "Ctrl-C: finishes the iteration" + (" and saves" if config.checkpoint.save else "")


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
    load = plan.resolved.config.checkpoint.load
    if load is None:
        return "new weights"
    try:
        return f"{load}/{Path(plan.working_directory, load, LATEST).read_text().strip()}"
    except OSError:
        return f"new weights (no checkpoint here in {load})"


def _saves(config: NeoXConfig) -> str:
    section = config.checkpoint
    if section.save is None:
        return "nothing: save is not set"
    times = [f"every {section.save_interval:,} iterations"] if section.save_interval else []
    times += [f"at growing intervals (x {section.save_growth:g})"] if section.save_growth else []
    times += [f"every {section.save_interval_minutes:g} min"] if section.save_interval_minutes else []
    kept = section.keep_last_n_checkpoints
    limit = f"; last {kept} kept" if kept else ""
    return f"{section.save}: {', '.join([*times, 'at the end'])}{limit}"


def _evaluates(config: NeoXConfig) -> str:
    training = config.training
    if not training.eval_iters:
        return ""
    return f"every {training.eval_interval:,} iterations and at the end, {training.eval_iters:,} batches"


def _logs(config: NeoXConfig) -> str:
    section = config.logging
    places = [f"{section.log_dir} (metrics.jsonl)"] if section.log_dir else []
    places += [f"{section.tensorboard_dir} (TensorBoard)"] if section.tensorboard_dir else []
    places += [f"W&B project {section.wandb_project}"] if section.use_wandb else []
    return ", ".join(places)


def _end_rows(plan: LaunchPlan, result: Result) -> Iterator[Row]:
    config, metrics = plan.resolved.config, result.state.metrics
    yield "iterations", f"{result.iteration:,} of {config.training.train_iters:,}"
    yield "loss", f"{metrics['loss/train']:.4f}" if "loss/train" in metrics else ""
    yield "validation loss", f"{metrics['loss/validation']:.4f}" if "loss/validation" in metrics else ""
    yield "duration", format_duration(result.seconds)
    yield "checkpoint", _latest_checkpoint(plan)
    yield "restarts", f"{result.restarts}" if result.restarts else ""
    yield "warnings", f"{result.warnings:,}" if result.warnings else ""


def _latest_checkpoint(plan: LaunchPlan) -> str:
    save = plan.resolved.config.checkpoint.save
    if save is None:
        return "none: save is not set"
    found = _checkpoints(plan)
    return str(Path(save, found[-1].name)) if found else f"none in {save} on this machine"


def _checkpoints(plan: LaunchPlan) -> list[Path]:
    save = plan.resolved.config.checkpoint.save
    try:
        return [] if save is None else complete_checkpoints(Path(plan.working_directory, save))
    except OSError:
        return []  # The file server may have ended the training.


def _next_rows(plan: LaunchPlan, request: Request, result: Result, *, is_finished: bool) -> Iterator[Row]:
    """Yield commands that can be typed now, with what each does."""
    config = plan.resolved.config
    if _checkpoints(plan):
        load = config.checkpoint.save if config.checkpoint.load != config.checkpoint.save else None
        if not is_finished:
            yield "resume", _command(request, load=load)
        yield "generate", _command(request, "generate", load=load)
        yield "evaluate", _command(request, "evaluate", load=load)
    elif not is_finished:
        yield "start again", _command(request)
    log_dir = config.logging.log_dir
    has_metrics = log_dir is not None and Path(plan.working_directory, log_dir, "metrics.jsonl").is_file()
    if log_dir is not None and has_metrics and result.iteration:
        yield "report", f"neox-report {shlex.quote(log_dir)}"


def _command(request: Request, program: str | None = None, *, load: str | None = None) -> str:
    """Return the command of this launch, with another program or another folder to load from."""
    words = ["neox-launch", *([program] if program else []), *request.paths]
    words += ["-d", request.directory] if request.directory else []
    overrides = [*request.overrides, *([f"load={load}"] if load else [])]
    for override in overrides:
        words += ["--set", override]
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

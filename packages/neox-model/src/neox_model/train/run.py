"""Run a training from its resolved configuration: set up every part, in order, and train."""

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from neox_config import NeoXConfig, Resolved
from neox_config.derive.curricula import length_schedule
from neox_config.derive.engine import engine_offers
from neox_config.errors import NeoXError
from neox_config.estimate import flops_per_token
from neox_config.estimate.shapes import shape_of
from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_data.tokenizers import Tokenizer
from neox_launcher.protocol.verification import Recording
from neox_launcher.worker.reporting import Progress, is_restart
from neox_model.assembly.compilation import compile_layers
from neox_model.assembly.model import build_model, padded_vocab_size
from neox_model.assembly.optimizer import build_optimizer, build_schedule
from neox_model.assembly.token_dropping import kept_tokens
from neox_model.checkpoint.background import BackgroundSaves
from neox_model.checkpoint.comparison import SAMPLES_DIGEST
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.load import ScheduleSource, load_checkpoint, read_training_state
from neox_model.checkpoint.outcome import gather, shared_outcome
from neox_model.checkpoint.parts import RunParts
from neox_model.checkpoint.save import save_checkpoint
from neox_model.checkpoint.save_lock import save_lock
from neox_model.engine.build import build_engine, prepare_engine
from neox_model.engine.contract import Engine
from neox_model.metrics.events import Events
from neox_model.metrics.memory import memory_metrics
from neox_model.metrics.peaks import peak_tflops
from neox_model.metrics.throughput import Throughput
from neox_model.metrics.timers import Phases, Timers
from neox_model.metrics.writers.base import MetricWriter
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import named_logical_parameters
from neox_model.parallel.random import seed_streams
from neox_model.processes import join_processes, leave_processes, load_tokenizer, recorded_values
from neox_model.train.about import about_run, device_name
from neox_model.train.data.batch import Batch
from neox_model.train.data.datasets import Datasets, check_tokenizers
from neox_model.train.data.documents import documents_of
from neox_model.train.data.position import START, Position, Ranges
from neox_model.train.data.sample_digest import digest_of_samples
from neox_model.train.data.streams import Stream, build_datasets, choose_weighting, open_streams
from neox_model.train.engine_step import EngineStep
from neox_model.train.evaluate import Evaluator
from neox_model.train.flops_profile import ProfiledStep
from neox_model.train.forward_check import ForwardCheck
from neox_model.train.hooks.autoresume import AutoresumeHook, find_service
from neox_model.train.hooks.base import Hook
from neox_model.train.hooks.checkpoint import Background, CheckpointHook
from neox_model.train.hooks.copies import CopiesDifferError, CopiesHook
from neox_model.train.hooks.drop_tokens import DropTokensHook
from neox_model.train.hooks.evaluate import EvaluateHook
from neox_model.train.hooks.garbage_collection import GarbageCollectionHook
from neox_model.train.hooks.gradients import GradientNormsHook, NoiseScaleHook, ZeroGradientsHook
from neox_model.train.hooks.guard import NonfiniteGuard
from neox_model.train.hooks.log import LogHook
from neox_model.train.hooks.norms import NormsHook, tensor_norms
from neox_model.train.hooks.progress import (
    ProgressHook,
    ProgressWriter,
    StatusReports,
    reported_progress,
    while_saving,
)
from neox_model.train.hooks.record import RecordHook
from neox_model.train.hooks.save_clock import SaveClock
from neox_model.train.hooks.spikes import SpikeHandler
from neox_model.train.hooks.stop import StopHook
from neox_model.train.left_out import forget_left_out, merged, read_left_out, write_left_out
from neox_model.train.loop import train
from neox_model.train.profilers import profilers
from neox_model.train.recent_losses import RecentLosses
from neox_model.train.spikes import LeftOutBatches, SpikeDetection
from neox_model.train.state import TrainState
from neox_model.train.step import TrainStep
from neox_model.train.varying_lengths import VaryingLengths
from neox_model.train.writers import check_services, open_writers

__all__ = ["train_from", "train_in"]

# A host that lost its connection in the last attempt may keep running, and hold the lock, for this long.
_RESTART_PATIENCE_SECONDS = 120.0

# Largest relative differences of the same weights' losses on different layouts.
_FORWARD_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 2e-3}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training(RunParts):
    """The parts of a training that several functions below use."""

    schedule: LearningRateSchedule
    state: TrainState
    resolved: Resolved
    tokenizer: Tokenizer
    datasets: Datasets

    @property
    def config(self) -> NeoXConfig:
        return self.resolved.config

    def recorded(self, position: Position) -> dict[str, Any]:
        """Return the values that a checkpoint at this position records about the run."""
        values = recorded_values(self.resolved, self.tokenizer)
        if self.groups.world.rank == 0:
            values[SAMPLES_DIGEST] = {
                part: digest_of_samples(self.datasets[part], count)
                for part, count in (("train", position.samples), ("valid", position.validation_samples))
                if part in self.datasets
            }
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outputs:
    """Where hooks report what happens.

    Args:
        writers: receive metrics; empty on ranks other than 0.
        progress: reports to the agent of this worker.
        events: receives events of the run.
    """

    writers: Sequence[MetricWriter]
    progress: Progress
    events: Events


def train_from(resolved: Resolved) -> str | None:
    """Train the configured model as one rank; call it on every rank.

    Returns:
        The last validation in one line; None if the training was stopped before its end.
    """
    groups = join_processes(resolved)
    result = train_in(groups, resolved)
    leave_processes()
    return result


def train_in(groups: Groups, resolved: Resolved) -> str | None:
    """Train like `train_from`, in process groups that already exist. Collective over all ranks."""
    with (
        reported_progress(groups.world.rank) as progress,
        _claim(resolved.config.checkpoint.save, groups),
    ):
        return _train(groups, resolved, progress)


def _claim(folder: str | None, groups: Groups) -> AbstractContextManager[None]:
    patience = _RESTART_PATIENCE_SECONDS if is_restart() else 0.0
    return nullcontext() if folder is None else save_lock(Path(folder), groups, patience=patience)


def _train(groups: Groups, resolved: Resolved, progress: Progress) -> str | None:
    config, derived = resolved.config, resolved.derived
    progress.describe(phase="preparing the data", last_iteration=config.training.train_iters)
    if groups.world.rank == 0:
        check_services(config)
    prepare_engine()
    tokenizer = load_tokenizer(config)
    check_tokenizers(resolved, tokenizer)
    position = _position(resolved, groups)
    datasets = build_datasets(resolved, position=position)
    progress.describe(phase="building the model")
    model = build_model(resolved, groups, vocab_size=tokenizer.vocab_size)
    optimizer = build_optimizer(config, model, model_group=groups.model, data_group=groups.data)
    schedule = build_schedule(config, optimizer, decay_iterations=derived.lr_decay_iters)
    engine = build_engine(resolved, model, optimizer, schedule, groups=groups)
    progress.describe(phase="compiling the layers")
    compile_layers(model, resolved, groups)
    seed_streams(config.training.seed, groups)
    state = TrainState(
        last_iteration=config.training.train_iters,
        samples_per_iteration=derived.train_batch_size,
        recent_losses=_recent_losses(config, engine),
    )
    training = _Training(
        resolved=resolved,
        groups=groups,
        engine=engine,
        schedule=schedule,
        state=state,
        tokenizer=tokenizer,
        datasets=datasets,
    )
    progress.describe(phase="loading the checkpoint" if config.checkpoint.load else "preparing the data")
    resumes = _load(training, position)
    _add_left_out(training)
    if state.finished:
        logger.info("all %d iterations are finished: only evaluation remains", state.last_iteration)
    streams = open_streams(
        resolved,
        datasets,
        groups,
        vocab_size=padded_vocab_size(config, tokenizer.vocab_size),
        end_of_document=tokenizer.end_of_document,
    )
    step = _build_step(training)
    evaluator = Evaluator(
        step.evaluate,
        streams,
        iterations=config.training.eval_iters,
        accumulation=derived.accumulation,
        samples_per_iteration=derived.train_batch_size,
    )
    forward = _forward_check(training, step, streams) if _validates_forward(config) else None
    if forward is not None and resumes and not config.checkpoint.finetune:
        forward.compare(state.forward_pass, source=f"{config.checkpoint.load}, iteration {state.iteration}")
    state.forward_pass = None
    with ExitStack() as resources:
        batches = resources.enter_context(closing(streams["train"](state.samples, state.iteration)))
        opened = open_writers(resolved, position=state.position) if groups.world.rank == 0 else []
        writers = [resources.enter_context(closing(writer)) for writer in opened]
        writers += [ProgressWriter(progress)] if progress.is_shown else []
        events = resources.enter_context(_run_events(training, writers, resumes=resumes))
        outputs = _Outputs(writers=writers, progress=progress, events=events)
        background = _background_saves(training)
        if background is not None:
            resources.callback(background.close)
        saves_start = not _has_start(config, resumes)
        hooks = _build_hooks(
            training, evaluator, outputs, background, saves_start=saves_start, forward=forward
        )
        hooks += resources.enter_context(profilers(config, engine, groups))
        train(state, step, *_recorded(training, batches, hooks))
    if state.stop_reason is not None or "valid" not in evaluator.results:
        return None
    return f"validation {evaluator.results['valid']}"


@contextmanager
def _run_events(training: _Training, writers: Sequence[MetricWriter], *, resumes: bool) -> Iterator[Events]:
    """Record the start of this attempt and, after the context, its end and the reason."""
    events, state = Events(writers), training.state
    if writers:
        checkpoint = training.config.checkpoint.load if resumes else None
        about = about_run(training.resolved, vocab_size=training.tokenizer.vocab_size, checkpoint=checkpoint)
        events.record("start", state.iteration, **about)
    try:
        yield events
    except BaseException as error:
        if isinstance(error, CopiesDifferError):
            events.record("sdc", state.iteration, message=str(error))
        events.record("end", state.iteration, reason="error", message=f"{type(error).__name__}: {error}")
        raise
    reason = "finished" if state.stop_reason is None else "stopped"
    events.record("end", state.iteration, reason=reason, message=state.stop_reason)


def _recorded(
    training: _Training, batches: Iterator[Batch], hooks: list[Hook]
) -> tuple[Iterator[Batch], list[Hook]]:
    """Add the recording hook if `neox-launch verify-resume` requests it."""
    recording = Recording.from_environment()
    if recording is None:
        return batches, hooks
    snapshot = None if recording.snapshot is None else Path(recording.snapshot)
    recorder = RecordHook(
        Path(recording.folder),
        training,
        iteration=recording.iteration,
        save=None if snapshot is None else partial(_save, training, snapshot),
    )
    return recorder.watch(batches), [*hooks, recorder]


def _build_step(training: _Training) -> TrainStep:
    derived = training.resolved.derived
    step: TrainStep = EngineStep(
        training.engine,
        accumulation=derived.accumulation,
        tokens=derived.train_batch_size * training.config.model.seq_length,
        weighting=choose_weighting(training.config, training.groups),
    )
    return LeftOutBatches(
        _with_profile(training, _with_spikes(training, _with_lengths(training, step))),
        accumulation=derived.accumulation,
        is_left_out=lambda: training.state.leaves_out_next,
    )


def _with_profile(training: _Training, step: TrainStep) -> TrainStep:
    """Wrap the step to count the operations of an iteration, if it is configured."""
    config, derived = training.config, training.resolved.derived
    section = config.engine.flops_profiler
    if not section.enabled:
        return step
    shape = shape_of(training.resolved, vocab_size=padded_vocab_size(config, training.tokenizer.vocab_size))
    is_recomputed = config.activation_checkpointing.checkpoint_activations

    def formula(tokens: int) -> int:
        actual = replace(shape, seq_length=tokens // derived.train_batch_size)
        return tokens * flops_per_token(actual, is_recomputed=is_recomputed)

    return ProfiledStep(
        step,
        section,
        engine=training.engine,
        groups=training.groups,
        state=training.state,
        formula=formula,
    )


def _validates_forward(config: NeoXConfig) -> bool:
    return config.checkpoint.checkpoint_validation_with_forward_pass


def _forward_check(
    training: _Training, step: TrainStep, streams: Mapping[str, Callable[..., Stream]]
) -> ForwardCheck:
    derived = training.resolved.derived
    evaluator = Evaluator(
        step.evaluate,
        streams,
        iterations=1,
        accumulation=derived.accumulation,
        samples_per_iteration=derived.train_batch_size,
    )
    return ForwardCheck(
        lambda: evaluator.evaluate("train", 0).loss,
        samples=derived.train_batch_size,
        tolerance=_FORWARD_TOLERANCE[derived.precision],
    )


def _recent_losses(config: NeoXConfig, engine: Engine) -> RecentLosses | None:
    section = config.training
    return None if section.on_spike is None else RecentLosses(section.spike_window, engine.device)


def _with_spikes(training: _Training, step: TrainStep) -> TrainStep:
    """Wrap the step to detect loss spikes, if `on_spike` is set."""
    section, losses = training.config.training, training.state.recent_losses
    if losses is None:
        return step
    update = training.engine.update if section.on_spike == "skip" else None
    return SpikeDetection(step, losses, threshold=section.spike_threshold, skips=update)


def _add_left_out(training: _Training) -> None:
    """Add the samples that a rollback leaves out to the state; a new training deletes an older file of them.

    Collective over all ranks.
    """
    section, state, control = training.config.checkpoint, training.state, training.groups.control
    resumed = section.save if is_restart() else None if section.finetune else section.load
    with shared_outcome(control, "reading which samples to leave out"):
        found = () if resumed is None or control.rank else read_left_out(Path(resumed))
        if section.save not in (None, resumed) and control.rank == 0:
            forget_left_out(Path(section.save))
    state.left_out = merged(state.left_out, *gather(control, found))
    for first, stop in state.left_out:
        if stop > state.samples:
            named = documents_of(training.datasets.get("train"), range(first, stop))
            logger.warning("samples %d to %d, from %s, are left out", first, stop - 1, named)


def _with_lengths(training: _Training, step: TrainStep) -> TrainStep:
    """Wrap the step for a curriculum's sequence lengths, if one is configured."""
    schedule, derived = length_schedule(training.config), training.resolved.derived
    if schedule is None:
        return step
    return VaryingLengths(
        step,
        tokens=lambda: derived.train_batch_size * schedule(training.state.iteration),
        forget_shapes=training.engine.forget_shapes,
    )


def _position(resolved: Resolved, groups: Groups) -> Position:
    """Return the position from which the data continues. Collective over all ranks."""
    section = resolved.config.checkpoint
    if section.load is None or section.finetune:
        return START
    return Position.from_state(read_training_state(Path(section.load), groups=groups))


def _load(training: _Training, position: Position) -> bool:
    """Continue from the latest checkpoint in `load`, if there is one.

    Returns:
        Whether there is one.

    Raises:
        CheckpointError: it cannot be loaded, or is not the one that `position` was read from.
    """
    section = training.config.checkpoint
    if section.load is None:
        return False
    iteration = load_checkpoint(
        Path(section.load),
        training,
        config=training.recorded(position),
        seed=training.config.training.seed,
        finetune=section.finetune,
        load_optimizer=not section.no_load_optim,
        load_rng=not section.no_load_rng,
        schedule_source=_schedule_source(training.config),
    )
    if iteration is None:
        logger.info("%s contains no checkpoint: starting from newly initialized weights", section.load)
    _check_momentum(training)
    if training.state.position != position:
        raise CheckpointError(
            f"another checkpoint appeared in {section.load} while this training was starting; start again, "
            "and make sure that no other training saves to that folder"
        )
    return iteration is not None


def _has_start(config: NeoXConfig, resumes: bool) -> bool:
    """Return whether `save` already contains the state from which this training starts."""
    section = config.checkpoint
    if section.load is None or section.save is None or not resumes:
        return False
    starts_anew = section.finetune or section.no_load_optim or section.no_load_rng
    return not starts_anew and Path(section.load).resolve() == Path(section.save).resolve()


def _check_momentum(training: _Training) -> None:
    """Check that a checkpoint's schedule, whose momentum may grow, keeps it below 1 until the end."""
    momentum = training.schedule.curve.momentum(training.state.last_iteration - 1)
    if momentum is not None and momentum >= 1:
        raise CheckpointError(
            f"the checkpoint's learning-rate schedule makes the momentum {momentum:.6g} in the last "
            "iteration; it must be less than 1; set override-lr-scheduler: true, or a smaller train-iters"
        )


def _schedule_source(config: NeoXConfig) -> ScheduleSource:
    if config.lr_schedule.override_lr_scheduler:
        return "config"
    return "checkpoint" if config.lr_schedule.use_checkpoint_lr_scheduler else "agreement"


def _save(training: _Training, directory: Path, *, save: Callable[..., object] = save_checkpoint) -> None:
    """Save the training by `save_checkpoint`, or by a function with the same arguments."""
    section = training.config.checkpoint
    save(
        directory,
        training,
        iteration=training.state.iteration,
        config=training.recorded(training.state.position),
        save_optimizer=not section.no_save_optim,
        save_rng=not section.no_save_rng,
        keep_last=section.keep_last_n_checkpoints,
    )


def _background_saves(training: _Training) -> BackgroundSaves | None:
    section = training.config.checkpoint
    if section.save is None or not section.async_save:
        return None
    if not hasattr(os, "memfd_create"):
        raise NeoXError("async-save requires Linux; set async-save: false")
    patience = training.config.launch.hang_timeout
    return BackgroundSaves(training.groups, training.engine.device, patience=patience)


def _build_hooks(
    training: _Training,
    evaluator: Evaluator,
    outputs: _Outputs,
    background: BackgroundSaves | None,
    *,
    saves_start: bool,
    forward: ForwardCheck | None = None,
) -> list[Hook]:
    """Build the hooks in the order in which they run: checkpoints follow the logging of an iteration."""
    config, timers = training.config, Timers()
    writers, progress, events = outputs.writers, outputs.progress, outputs.events
    throughput = _measure_model(training)
    log = LogHook(
        writers,
        schedule=training.schedule,
        throughput=throughput,
        timers=timers,
        interval=config.logging.log_interval,
        memory=partial(memory_metrics, training.engine.device),
        phases=_phases(training),
    )
    guard = NonfiniteGuard(
        patience=config.training.nonfinite_patience,
        # On a GPU every reading synchronizes.
        interval=min(config.logging.log_interval, 100) if training.engine.device.type == "cuda" else 1,
        min_loss_scale=training.engine.update.min_loss_scale,
        documents=partial(documents_of, training.datasets.get("train")),
        reports=training.groups.world.rank == 0,
        before_end=log.write_pending,
        events=events,
        **_spike_handling(training, log),
    )

    interval = config.training.sdc_check_interval
    copies = (
        None
        if interval is None
        else CopiesHook(training.engine, training.groups, interval=interval, before_end=log.write_pending)
    )

    def before_save() -> None:
        log.write_pending()
        guard.catch_up()
        if copies is not None:
            copies.compare(training.state.iteration)
        with shared_outcome(training.groups.control, "checking the last iteration"):
            guard.refuse_to_save()
        if forward is not None:
            training.state.forward_pass = forward.result()

    hooks: list[Hook] = [
        ProgressHook(progress, StatusReports(progress, schedule=training.schedule, throughput=throughput)),
        *_autoresume(training),
        StopHook(
            training.groups.control,
            exit_interval=config.training.exit_interval,
            save=config.checkpoint.save,
        ),
        log,
        guard,
        *([] if copies is None else [copies]),
        EvaluateHook(
            evaluator,
            interval=config.training.eval_interval,
            writers=writers,
            timers=timers,
            before_evaluation=log.write_pending,
            while_evaluating=lambda name: progress.phase(f"evaluating ({name})"),
            events=events,
        ),
    ]
    if config.logging.log_param_norm or config.logging.log_optimizer_states:
        hooks.append(_norms(training, writers, log))
    hooks += _gradient_hooks(training, writers, log)
    if config.checkpoint.save is not None:
        extra = {each for each in config.checkpoint.extra_save_iters or () if each or saves_start}
        hooks.append(
            _saving(training, Path(config.checkpoint.save), extra, timers, before_save, outputs, background)
        )
    kept = kept_tokens(config)
    if kept is not None:
        hooks.append(DropTokensHook(training.model, kept.at))
    return [*hooks, GarbageCollectionHook()]


def _phases(training: _Training) -> Phases | None:
    """Measure the phases of training steps on every rank, if it is configured."""
    section = training.config.engine
    if not (section.wall_clock_breakdown or section.flops_profiler.enabled):
        return None
    device = training.engine.device
    phases = Phases(partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None)
    training.engine.measure_phases(phases.measure)
    return phases


def _spike_handling(training: _Training, log: LogHook) -> dict[str, SpikeHandler]:
    """Return the guard's argument that acts on spikes; none if `on_spike` is not set."""
    section, groups = training.config.training, training.groups
    if section.on_spike is None:
        return {}

    def leave_out(ranges: Ranges) -> None:
        with shared_outcome(groups.control, "storing the samples to leave out"):
            if groups.control.rank == 0:
                write_left_out(Path(training.config.checkpoint.save or "."), ranges)

    handler = SpikeHandler(
        section.on_spike,
        patience=section.spike_patience,
        batches=section.spike_rollback_batches,
        state=training.state,
        documents=partial(documents_of, training.datasets.get("train")),
        reports=groups.world.rank == 0,
        before_end=log.write_pending,
        leave_out=leave_out,
    )
    return {"on_spike": handler}


def _autoresume(training: _Training) -> Iterator[Hook]:
    section = training.config.training
    if section.adlr_autoresume:
        service = find_service(section.adlr_autoresume_service)
        yield AutoresumeHook(service, training.groups.control, interval=section.adlr_autoresume_interval)


def _gradient_hooks(training: _Training, writers: Sequence[MetricWriter], log: LogHook) -> Iterator[Hook]:
    section, update = training.config.logging, training.engine.update
    if section.log_grad_norm and engine_offers(training.config, "before_update"):
        yield GradientNormsHook(
            update,
            training.groups,
            writers=writers,
            interval=section.log_interval,
            before_writing=log.write_pending,
        )
    if section.log_zero_gradients:
        yield ZeroGradientsHook(
            update, writers=writers, interval=section.log_interval, before_writing=log.write_pending
        )
    if section.log_gradient_noise_scale:
        yield NoiseScaleHook(
            update,
            count=section.gradient_noise_scale_n_batches,
            on_host=section.gradient_noise_scale_cpu_offload,
            writers=writers,
            interval=section.log_interval,
            before_writing=log.write_pending,
        )


def _saving(
    training: _Training,
    directory: Path,
    extra: Collection[int],
    timers: Timers,
    before_save: Callable[[], None],
    outputs: _Outputs,
    saves: BackgroundSaves | None,
) -> CheckpointHook:
    section = training.config.checkpoint
    minutes = section.save_interval_minutes

    return CheckpointHook(
        lambda state: _save(training, directory),
        interval=section.save_interval,
        growth=section.save_growth,
        extra=extra,
        clock=None if minutes is None else SaveClock(training.groups.control, minutes=minutes),
        background=None if saves is None else _background(training, directory, saves),
        timers=timers,
        before_save=before_save,
        while_saving=partial(while_saving, outputs.progress),
        events=outputs.events,
    )


def _background(training: _Training, directory: Path, saves: BackgroundSaves) -> Background:
    states = not training.config.checkpoint.no_save_optim
    return Background(
        start=lambda state: _save(training, directory, save=saves.start),
        saves=saves,
        prepare=partial(saves.prepare, training, save_optimizer=states),
    )


def _norms(training: _Training, writers: Sequence[MetricWriter], log: LogHook) -> NormsHook:
    section = training.config.logging
    return NormsHook(
        partial(
            tensor_norms,
            training.engine,
            training.groups,
            parameters=section.log_param_norm,
            states=section.log_optimizer_states,
        ),
        writers=writers,
        interval=section.log_interval,
        before_writing=log.write_pending,
    )


def _measure_model(training: _Training) -> Throughput:
    """Count the model's parameters over all stages. Collective over all ranks."""
    held = {
        name: parameter.logical.shape  # type: ignore[attr-defined]
        for name, parameter in named_logical_parameters(training.model)
    }
    stages = gather(training.groups.control, held) if training.groups.pipe.size > 1 else [held]
    shapes = {name: shape for stage in stages for name, shape in stage.items()}
    count = sum(prod(shape) for shape in shapes.values())
    logger.info("the model has %s parameters in %d layers", f"{count:,}", training.config.model.num_layers)
    vocab_size = shapes[TOKEN_EMBEDDING][0]
    flops = flops_per_token(shape_of(training.resolved, vocab_size=vocab_size))
    return Throughput(
        flops_per_token=flops,
        num_devices=training.groups.world.size,
        peak_tflops=peak_tflops(device_name(), training.resolved.derived.precision)[0],
    )

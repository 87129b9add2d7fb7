"""Build the hooks of a training from its configuration."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from neox_config.counted import counted
from neox_config.errors import NeoXError
from neox_config.estimate import flops_per_token
from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_launcher.worker.reporting import Progress
from neox_model.checkpoint.background import BackgroundSaves
from neox_model.checkpoint.directory import find_latest
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.outcome import gather, shared_outcome
from neox_model.extras.token_dropping.layer import kept_tokens
from neox_model.metrics.memory import memory_metrics
from neox_model.metrics.peaks import peak_tflops
from neox_model.metrics.throughput import Throughput
from neox_model.metrics.timers import Phases, Timers
from neox_model.parallel.logical import named_logical_parameters
from neox_model.train.about import device_name
from neox_model.train.compression import CompressionHook
from neox_model.train.copied_model import copied_forward
from neox_model.train.data.documents import documents_of
from neox_model.train.data.position import Ranges
from neox_model.train.evaluate import Evaluator
from neox_model.train.forward_check import ForwardCheck
from neox_model.train.hooks.base import Hook, MetricsHook, Write
from neox_model.train.hooks.copies import CopiesHook
from neox_model.train.hooks.evaluate import EvaluateHook, ReserveHook, evaluate_texts
from neox_model.train.hooks.guard import NonfiniteGuard, SpikeHandler
from neox_model.train.hooks.log import LogHook
from neox_model.train.hooks.progress import ProgressHook
from neox_model.train.hooks.stop import AutoresumeHook, StopHook, find_service
from neox_model.train.hooks.stragglers import straggler_hooks
from neox_model.train.hooks.tensors import GradientNoise, GradientNorms, ZeroGradients, tensor_norms
from neox_model.train.hooks.upkeep import DropTokensHook, GarbageCollectionHook, LocalStepsHook
from neox_model.train.loading import owner_of, write_left_out
from neox_model.train.saving import CheckpointHook, UploadHook, build_checkpoint_hook
from neox_model.train.state import TrainState
from neox_model.train.training import Outputs, Training

__all__ = ["build_hooks", "describe_size"]

logger = logging.getLogger(__name__)


def build_hooks(
    training: Training,
    evaluator: Evaluator,
    outputs: Outputs,
    background: BackgroundSaves | None,
    *,
    saves_start: bool,
    forward: ForwardCheck | None = None,
) -> tuple[list[Hook], Callable[[], None]]:
    """Build the hooks in the order in which they run: checkpoints follow the logging of an iteration.

    Returns:
        The hooks, and what must be called before a save by another program; may refuse to save. Collective.
    """
    config, timers, throughput = training.config, Timers(), _measure_model(training)
    engine, groups, section = training.engine, training.groups, config.logging
    progress, log = outputs.progress, _build_log(training, outputs, timers, throughput)
    checkpoint: CheckpointHook | None = None

    def before_end() -> None:
        log.write_pending()
        if checkpoint is not None:
            checkpoint.finish(training.state)

    shared: dict[str, Any] = {
        "documents": partial(documents_of, training.datasets.get("train")),
        "reports": groups.world.rank == 0,
        "before_end": before_end,
        "events": outputs.events,
    }
    spikes = _spike_handler(training, **shared)
    guard = NonfiniteGuard(
        patience=config.training.nonfinite_patience,
        # On a GPU every reading synchronizes.
        interval=min(section.log_interval, 100) if engine.device.type == "cuda" else 1,
        min_loss_scale=engine.update.min_loss_scale,
        on_spike=spikes,
        **shared,
    )
    sdc_interval, copies = config.training.sdc_check_interval, None
    if sdc_interval is not None:
        copies = CopiesHook(engine, groups, interval=sdc_interval, before_end=before_end)
    stop = StopHook(groups.control, exit_interval=config.training.exit_interval, save=config.checkpoint.save)
    hooks: list[Hook] = [
        ProgressHook(progress, schedule=training.schedule, throughput=throughput),
        *_first(training, log.write),
        stop,
        *straggler_hooks(section, engine, groups, write=log.write, events=outputs.events),
        log,
        guard,
        *([] if copies is None else [copies]),
        ReserveHook(evaluator.samples, interval=config.training.eval_interval),
        *_measurements(training, log.write),
    ]
    before_save = _before_save(training, log, guard, copies, forward)
    if config.checkpoint.save is not None:
        checkpoint = build_checkpoint_hook(
            training,
            Path(config.checkpoint.save),
            {each for each in config.checkpoint.extra_save_iters or () if each or saves_start},
            timers,
            before_save,
            outputs,
            background,
            saved=None if spikes is None else spikes.saved,
        )
        hooks.append(checkpoint)
    # After the checkpoint of the iteration: they may take long, and tasks and texts of others may fail.
    save_last = _nothing if checkpoint is None else checkpoint.save_last
    hooks.append(_build_evaluation(training, evaluator, outputs, timers, log, stop, save_last))
    hooks += _last(training, progress, saves_start=saves_start)

    def before_other_save() -> None:
        before_end()
        before_save()

    return hooks, before_other_save


def _build_log(training: Training, outputs: Outputs, timers: Timers, throughput: Throughput) -> LogHook:
    section, engine, phases = training.config.engine, training.engine, None
    if section.wall_clock_breakdown or section.flops_profiler.enabled:
        # On every rank, because it synchronizes.
        on_gpu = engine.device.type == "cuda"
        phases = Phases(partial(torch.cuda.synchronize, engine.device) if on_gpu else lambda: None)
        engine.measure_phases(phases.measure)
    return LogHook(
        outputs.writers,
        schedule=training.schedule,
        throughput=throughput,
        timers=timers,
        interval=training.config.logging.log_interval,
        memory=partial(memory_metrics, engine.device),
        phases=phases,
    )


def _before_save(
    training: Training,
    log: LogHook,
    guard: NonfiniteGuard,
    copies: CopiesHook | None,
    forward: ForwardCheck | None,
) -> Callable[[], None]:
    """Build what must be done, and may refuse to save, before each checkpoint. It is collective."""

    def before_save() -> None:
        log.write_pending()
        guard.catch_up()
        if copies is not None:
            copies.compare(training.state.iteration)
        with shared_outcome(training.groups.control, "checking the last iteration"):
            guard.refuse_to_save()
        if forward is not None:
            training.state.forward_pass = forward.result()

    return before_save


def _first(training: Training, write: Write) -> Iterator[Hook]:
    """Build the hooks that precede all that use the model after an iteration, or save it."""
    config, compression = training.config, training.compression
    if training.eigenvalues is not None:
        # They are measured before the iteration.
        yield MetricsHook(
            training.eigenvalues.metrics,
            interval=config.engine.eigenvalue.gas_boundary_resolution,
            after=1,
            write=write,
        )
    if compression is not None:
        shared = config.compression.compression_training.weight_quantization.shared_parameters
        yield CompressionHook(compression, is_verbose=shared.enabled and shared.quantize_verbose)
        yield MetricsHook(compression.report, interval=config.logging.log_interval, write=write)
    section = config.training
    if section.adlr_autoresume:
        service = find_service(section.adlr_autoresume_service)
        yield AutoresumeHook(service, training.groups.control, interval=section.adlr_autoresume_interval)


def _measurements(training: Training, write: Write) -> Iterator[Hook]:
    """Build the hooks that measure weights, states and gradients."""
    section, engine, groups = training.config.logging, training.engine, training.groups
    update, state, interval = engine.update, training.state, section.log_interval
    measures: list[Callable[[], dict[str, float]]] = []
    parameters, states = section.log_param_norm, section.log_optimizer_states
    if parameters or states:
        measures.append(partial(tensor_norms, engine, groups, parameters=parameters, states=states))
    if section.log_grad_norm and "before_update" in training.resolved.run.engine.offers:
        measures.append(GradientNorms(update, groups, state, interval=interval).metrics)
    if section.log_zero_gradients:
        measures.append(ZeroGradients(update, state, interval=interval).metrics)
    if section.log_gradient_noise_scale:
        count, on_host = section.gradient_noise_scale_n_batches, section.gradient_noise_scale_cpu_offload
        measures.append(GradientNoise(update, state, count=count, on_host=on_host).metrics)
    for measure in measures:
        yield MetricsHook(measure, interval=interval, write=write)


def _last(training: Training, progress: Progress, *, saves_start: bool) -> Iterator[Hook]:
    """Build the hooks that follow saves and evaluations."""
    optimizer = training.engine.update.optimizer
    if hasattr(optimizer, "replicas_differ"):
        yield LocalStepsHook(optimizer)
    kept = kept_tokens(training.config.data_efficiency.data_efficiency)
    if kept is not None:
        yield DropTokensHook(training.model, kept.at)
    yield GarbageCollectionHook()
    if training.uploads is not None:
        resumed = None if saves_start else find_latest(Path(training.config.checkpoint.load or ""))
        yield UploadHook(training.uploads, resumed=resumed, while_waiting=progress.repeated)


def _build_evaluation(
    training: Training,
    evaluator: Evaluator,
    outputs: Outputs,
    timers: Timers,
    log: LogHook,
    stop: StopHook,
    save_last: Callable[[TrainState], None],
) -> EvaluateHook:
    @contextmanager
    def evaluating(name: str) -> Iterator[None]:
        log.write_pending()
        reported = outputs.progress.phase(f"evaluating ({name})", iteration=training.state.iteration)
        with timers.measure("evaluate"), reported:
            yield

    def write(metrics: Mapping[str, float], iteration: int) -> None:
        log.write(metrics, iteration)
        if "loss/validation" in metrics:
            outputs.progress.describe(metrics={"loss/validation": metrics["loss/validation"]})

    texts: Callable[[TrainState], None] = _nothing
    if training.texts is not None:
        texts = partial(
            evaluate_texts,
            training.texts,
            partial(copied_forward, training),
            writes_files=bool(training.config.generation.eval_results_prefix),
            is_stopping=lambda: stop.is_requested,
            write=write,
            evaluating=evaluating,
        )
    return EvaluateHook(
        evaluator,
        stop=stop,
        texts=texts,
        save_last=save_last,
        write=write,
        evaluating=evaluating,
        events=outputs.events,
    )


def _nothing(state: TrainState) -> None:
    """Do nothing: it is not configured."""


def _spike_handler(training: Training, **shared: Any) -> SpikeHandler | None:
    """Build what acts on spikes; None if `on_spike` is not set."""
    section, control = training.config.training, training.groups.control
    if section.on_spike is None:
        return None

    def leave_out(ranges: Ranges) -> None:
        save = training.config.checkpoint.save
        assert save is not None, "a rollback requires `save`"
        try:
            with shared_outcome(control, "storing the samples to leave out"):
                if control.rank == 0:
                    write_left_out(Path(save), ranges, owner_of(training))
        except CheckpointError as error:
            # Not a failure to save a checkpoint, after which the training would continue.
            raise NeoXError(f"a loss is a spike, and {error}") from error

    return SpikeHandler(
        section.on_spike,
        patience=section.spike_patience,
        batches=section.spike_rollback_batches,
        state=training.state,
        leave_out=leave_out,
        **shared,
    )


def describe_size(parameters: Sequence[tuple[Sequence[int], bool]]) -> str:
    """Return the number of parameters, and of those that are trained if these are not all, in words.

    Args:
        parameters: the shape of each tensor, and whether it is trained.
    """
    count = sum(prod(shape) for shape, _ in parameters)
    num_trained = sum(prod(shape) for shape, is_trained in parameters if is_trained)
    trained = "" if num_trained == count else f" ({num_trained:,} of them are trained)"
    return f"{count:,} parameters{trained}"


def _measure_model(training: Training) -> Throughput:
    """Count the model's parameters over all stages. Collective over all ranks."""
    held = {
        name: (parameter.logical.shape, parameter.requires_grad)  # type: ignore[attr-defined]
        for name, parameter in named_logical_parameters(training.model)
    }
    stages = gather(training.groups.control, held) if training.groups.pipe.size > 1 else [held]
    held = {name: parameter for stage in stages for name, parameter in stage.items()}
    layers = counted(training.config.model.num_layers, "layer")
    logger.info("the model has %s in %s", describe_size(list(held.values())), layers)
    # Towers have a prefix, and vocabularies of one size.
    entries = next(shape[0] for name, (shape, _) in held.items() if name.endswith(TOKEN_EMBEDDING))
    flops = partial(
        flops_per_token,
        training.resolved.model,
        entries=entries,
        length=training.resolved.run.batch.length,
    )
    return Throughput(
        flops_per_token=flops(),
        causal_flops_per_token=flops(convention="causal"),
        num_devices=training.groups.world.size,
        peak_tflops=peak_tflops(device_name(), training.resolved.run.precision.weights)[0],
    )

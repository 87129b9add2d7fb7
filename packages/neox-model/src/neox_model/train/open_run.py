"""Set up a run from its resolved configuration, part by part in order, and train."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pkgutil import resolve_name

from neox_config import Resolved
from neox_config.derive.adapters import base_of_adapters
from neox_config.derive.evaluation import evaluates_texts
from neox_config.errors import NeoXError
from neox_config.spec.resume import flat_values, recorded_values
from neox_launcher.worker.reporting import Progress
from neox_model.assembly.attention_backend import attention_backends, log_backends
from neox_model.assembly.choices import computing_device
from neox_model.assembly.compilation import compile_layers
from neox_model.assembly.model import build_model
from neox_model.assembly.optimizer import build_optimizer
from neox_model.assembly.zero_sharding import gathered_parameter
from neox_model.checkpoint.base import load_base
from neox_model.checkpoint.storage import Storage, find_storage
from neox_model.engine.build import build_engine, prepare_engine
from neox_model.metrics.bus import Metrics
from neox_model.metrics.events import Events
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import Groups
from neox_model.parallel.random import seed_streams
from neox_model.processes import load_tokenizer
from neox_model.scoring.evaluation import TextEvaluation
from neox_model.train.callbacks.build import add_callbacks
from neox_model.train.callbacks.profilers import recorded_memory
from neox_model.train.callbacks.progress import reported_progress
from neox_model.train.callbacks.replica_check import CopiesDifferError
from neox_model.train.callbacks.stop import find_service
from neox_model.train.data.datasets import check_passes, check_tokenizers
from neox_model.train.data.objective import check_special_tokens, samples_of_objective
from neox_model.train.data.position import Position
from neox_model.train.data.streams import build_datasets, choose_weighting, open_streams
from neox_model.train.determinism import use_deterministic_algorithms
from neox_model.train.evaluate import Evaluator, character_count, retrieval_loss
from neox_model.train.export import check_export, export
from neox_model.train.loading import add_left_out, folder_to_load, load_into, position_in
from neox_model.train.loop import Loop
from neox_model.train.recent_losses import RecentLosses
from neox_model.train.run import NO_EXTENSIONS, Extensions, Run
from neox_model.train.run_info import first_weights, model_throughput, run_info
from neox_model.train.saving import build_uploads, check_saves, claim_folder
from neox_model.train.state import TrainState
from neox_model.train.step import EngineStep
from neox_model.train.writers import check_services, open_writers

__all__ = ["open_run", "train_in"]

logger = logging.getLogger(__name__)

# What the estimate, the search for sources and the drivers of devices raise.
_NOT_DESCRIBED = (ArithmeticError, AssertionError, LookupError, NeoXError, OSError, RuntimeError, ValueError)

_TEACHER = "neox_model.extras.distillation.teacher"


def train_in(groups: Groups, resolved: Resolved) -> str | None:
    """Train the configured model. Collective over all ranks.

    Returns:
        The last evaluations, one per line; None if the run was stopped before its end.
    """
    with open_run(groups, resolved) as (run, loop):
        loop.run()
        export(run)
    return run.result


@contextmanager
def open_run(
    groups: Groups, resolved: Resolved, extensions: Extensions = NO_EXTENSIONS
) -> Iterator[tuple[Run, Loop]]:
    """Set up a run, and release its parts after the block. Collective over all ranks.

    Args:
        groups: this rank's process groups.
        resolved: the configuration.
        extensions: what a program adds to it.

    Returns:
        The run, and the loop that trains it.
    """
    config, is_first = resolved.config, groups.world.rank == 0
    storage = find_storage(config.checkpoint, groups)
    with ExitStack() as resources:
        progress = resources.enter_context(reported_progress(groups.world.rank))
        resources.enter_context(claim_folder(config.checkpoint.save, groups, storage))
        assert resolved.update.iterations is not None, "their number is known where the data is read"
        memory = recorded_memory(
            config.logging, rank=groups.world.rank, last_iteration=resolved.update.iterations
        )
        if memory is not None:
            resources.callback(memory.close)
        run, position = _build(groups, resolved, storage, progress, extensions)
        add_callbacks(run, extensions, memory)
        for callback in run.callbacks:
            resources.callback(callback.close)
        progress.describe(phase="loading the checkpoint" if config.checkpoint.load else "preparing the data")
        run.resumes = load_into(run, position)
        add_left_out(run)
        for callback in run.callbacks:
            callback.on_load()
        if run.state.finished:
            logger.info("all %d iterations are finished: only evaluation remains", run.state.last_iteration)
        batches = resources.enter_context(
            closing(run.streams["train"](run.state.samples, run.state.iteration))
        )
        if is_first:
            run.metrics.writers = open_writers(
                config.logging,
                config.monitors,
                config.checkpoint,
                last_iteration=config.training.iterations,
                batch=resolved.run.batch.whole,
                values=flat_values(config),
                position=run.state.position,
            )
        for writer in run.metrics.writers:
            resources.enter_context(closing(writer))
        run.events = Events(run.metrics.writers)
        resources.enter_context(_recorded_attempt(run, extensions.source))
        yield run, Loop(run, batches)


def _build(
    groups: Groups, resolved: Resolved, storage: Storage, progress: Progress, extensions: Extensions
) -> tuple[Run, Position]:
    """Build the data, the model and the engine; return also the position in the data to continue from."""
    config = resolved.config
    progress.describe(phase="preparing the data", last_iteration=config.training.iterations)
    use_deterministic_algorithms(config.training, compiles=resolved.run.compilation.requested is not False)
    check_saves(config.checkpoint)
    if groups.world.rank == 0:
        check_services(config.logging, config.monitors)
    if config.training.adlr_autoresume:
        find_service(config.training.adlr_autoresume_service)
    uploads = build_uploads(config.checkpoint, groups)
    prepare_engine(resolved.run)
    tokenizer = load_tokenizer(config.tokenizer)
    entries = resolved.model.embedding.entries(tokenizer.vocab_size)
    check_tokenizers(resolved.data, tokenizer, entries=entries)
    check_special_tokens(resolved.data, tokenizer)
    if groups.world.rank == 0:
        check_export(resolved, tokenizer)
    # Before the model is built, so that an unknown task is reported at once.
    texts = None
    if evaluates_texts(config):
        texts = TextEvaluation(
            config.generation,
            resolved.run.batch,
            tokenizer,
            groups,
            seed=config.training.seed,
            configuration=flat_values(config),
        )
    load = folder_to_load(config.checkpoint, config.adapters, groups, storage)
    position = position_in(load, groups, finetune=config.checkpoint.finetune)
    check_passes(config.training, config.data, resolved.run.batch, position)
    datasets = build_datasets(resolved, position=position, difficulties=extensions.difficulties)
    progress.describe(phase="building the model")
    model = build_model(resolved.model, resolved.run, groups, vocab_size=tokenizer.vocab_size)
    backends = attention_backends(resolved.model, resolved.run, computing_device())
    log_backends(backends)
    writable = partial(gathered_parameter, groups=groups)
    recorded = recorded_values(resolved, fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size)
    filling = {"load": load, "groups": groups, "recorded": recorded, "writable": writable}
    reduction = config.compression.compression_training.layer_reduction
    if reduction.enabled:
        resolve_name(f"{_TEACHER}:start_from_teacher")(reduction, resolved.model.kinds, model, **filling)
    extensions.fill(model, groups)
    if resolved.data.objective == "ict":
        load_towers = resolve_name("neox_model.extras.retrieval.load_towers:load_towers")
        load_towers(config.objective.bert_load, model, **filling)
    base = load_base(
        base_of_adapters(config),
        model,
        adapters=load,
        groups=groups,
        config=recorded,
        writable=writable,
        cache=config.checkpoint.store_cache,
    )
    optimizer = build_optimizer(
        resolved.update.optimizer, resolved.run, model, model_group=groups.model, data_group=groups.data
    )
    curve = resolved.update.curve
    assert curve is not None, "the number of iterations is known where the data is read"
    schedule = LearningRateSchedule(optimizer, curve)
    engine = build_engine(resolved.run, resolved.update, model, optimizer, schedule, groups=groups)
    if reduction.enabled:
        add_distillation = resolve_name(f"{_TEACHER}:add_distillation")
        add_distillation(resolved, model, groups=groups, recorded=recorded, vocab_size=tokenizer.vocab_size)
    progress.describe(phase="compiling the layers")
    compile_layers(
        model, resolved.run, groups, width=resolved.model.width, iterations=config.training.iterations
    )
    seed_streams(config.training.seed, groups)
    section, batch = config.training, resolved.run.batch
    weighting = choose_weighting(resolved.update.normalization, groups)
    step = EngineStep(
        engine, accumulation=batch.accumulation, tokens=batch.whole * batch.length, weighting=weighting
    )
    streams = open_streams(
        resolved.data,
        resolved.run,
        samples_of_objective(datasets, resolved.data, tokenizer),
        groups,
        vocab_size=entries,
        end_of_document=tokenizer.end_of_document,
        largest_id=tokenizer.largest_id,
        difficulties=extensions.difficulties,
    )
    evaluator = Evaluator(
        step.evaluate,
        streams,
        iterations=section.eval_iters,
        accumulation=batch.accumulation,
        samples_per_iteration=batch.whole,
        characters=character_count(config.generation, tokenizer, groups),
        retrieval=retrieval_loss(engine.model),
    )
    run = Run(
        resolved=resolved,
        groups=groups,
        engine=engine,
        schedule=schedule,
        state=TrainState(
            last_iteration=section.iterations,
            samples_per_iteration=batch.whole,
            recent_losses=(
                None if section.on_spike is None else RecentLosses(section.spike_window, engine.device)
            ),
        ),
        # What was downloaded is whole on every host.
        storage=storage,
        tokenizer=tokenizer,
        datasets=datasets,
        streams=streams,
        step=step,
        evaluator=evaluator,
        metrics=Metrics(),
        progress=progress,
        throughput=model_throughput(resolved.model, resolved.run, engine.model, groups),
        load=load,
        uploads=uploads,
        base=base,
        texts=texts,
        difficulties=extensions.difficulties,
        attention={backend.kind: backend.name for backend in backends},
    )
    return run, position


@contextmanager
def _recorded_attempt(run: Run, source: str | None) -> Iterator[None]:
    """Record the start of this attempt and, after the block, its end and the reason."""
    events, state, config = run.events, run.state, run.config
    if events.are_recorded:
        reduction = config.compression.compression_training.layer_reduction
        first = first_weights(run.resolved.data, reduction) or source
        try:
            about = run_info(run, weights=config.checkpoint.load if run.resumes else first)
        except _NOT_DESCRIBED:
            # A report must not end a run.
            logger.exception("the record does not describe this attempt, training continues")
        else:
            events.record("start", state.iteration, **about)
    try:
        yield
    except BaseException as error:
        if isinstance(error, CopiesDifferError):
            events.record("sdc", state.iteration, message=str(error))
        events.record("end", state.iteration, reason="error", message=f"{type(error).__name__}: {error}")
        raise
    reason = "finished" if state.stop_reason is None else "stopped"
    events.record("end", state.iteration, reason=reason, message=state.stop_reason)

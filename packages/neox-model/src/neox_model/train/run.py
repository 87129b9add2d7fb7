"""Run a training from its resolved configuration: set up every part, in order, and train."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from neox_config import Resolved
from neox_config.derive.adapters import base_of_adapters
from neox_config.derive.evaluation import evaluates_texts
from neox_config.errors import NeoXError
from neox_config.spec.resume import flat_values, recorded_values
from neox_launcher.protocol.verification import Recording
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
from neox_model.extras.retrieval.load_towers import load_towers
from neox_model.extras.retrieval.towers import BLOCK, QUERY
from neox_model.metrics.events import Events
from neox_model.metrics.writers.base import MetricWriter
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import Groups
from neox_model.parallel.random import seed_streams
from neox_model.processes import load_tokenizer
from neox_model.scoring.evaluation import TextEvaluation
from neox_model.train.about import about_run, first_weights
from neox_model.train.build_hooks import build_hooks
from neox_model.train.build_step import (
    build_compression,
    build_eigenvalues,
    build_forward_check,
    build_step,
)
from neox_model.train.data.batch import Batch
from neox_model.train.data.datasets import check_passes, check_tokenizers
from neox_model.train.data.objective import check_special_tokens, samples_of_objective
from neox_model.train.data.position import Position
from neox_model.train.data.streams import build_datasets, open_streams
from neox_model.train.determinism import use_deterministic_algorithms
from neox_model.train.evaluate import PARTS, Evaluator, character_count, retrieval_model
from neox_model.train.export import check_export, export
from neox_model.train.hooks.base import Hook
from neox_model.train.hooks.copies import CopiesDifferError
from neox_model.train.hooks.progress import reported_progress
from neox_model.train.hooks.record import RecordHook
from neox_model.train.hooks.stop import find_service
from neox_model.train.loading import add_left_out, folder_to_load, has_start, load_into, position_in
from neox_model.train.loop import Loop
from neox_model.train.profilers import MemoryHook, profilers, recorded_memory
from neox_model.train.recent_losses import RecentLosses
from neox_model.train.saving import (
    build_background_saves,
    build_uploads,
    check_saves,
    claim_folder,
    save_training,
)
from neox_model.train.state import TrainState
from neox_model.train.teacher import add_distillation, start_from_teacher
from neox_model.train.training import NO_ADDITIONS, Additions, Outputs, Training
from neox_model.train.writers import check_services, open_writers

__all__ = ["Run", "open_training", "train_in"]

logger = logging.getLogger(__name__)

# What the estimate, the search for sources and the drivers of devices raise.
_NOT_DESCRIBED = (ArithmeticError, AssertionError, LookupError, NeoXError, OSError, RuntimeError, ValueError)


def train_in(groups: Groups, resolved: Resolved) -> str | None:
    """Train the configured model. Collective over all ranks.

    Returns:
        The last evaluations, one per line; None if the training was stopped before its end.
    """
    with open_training(groups, resolved) as run:
        run.loop.run()
        run.export()
    return run.result


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training that is ready to run.

    Args:
        training: its parts.
        loop: trains.
        evaluator: has the results of the evaluations.
        before_save: must be called before a save other than the configured ones. Collective.
        progress: reports to the agent of this worker.
    """

    training: Training
    loop: Loop
    evaluator: Evaluator
    before_save: Callable[[], None]
    progress: Progress

    @property
    def result(self) -> str | None:
        """Return the last evaluations, one per line; None if the training was stopped before its end."""
        results, state = self.evaluator.results, self.training.state
        if state.stop_reason is not None:
            return None
        lines = [f"{PARTS[part]} {results[part]}" for part in PARTS if part in results]
        return "\n".join(f"{line}, after iteration {state.iteration:,}" for line in lines) or None

    def export(self) -> None:
        """Export the last checkpoint, if that is configured; on rank 0."""
        if self.training.groups.world.rank == 0:
            export(self.training.config.checkpoint, self.training.state, self.progress)


@contextmanager
def open_training(groups: Groups, resolved: Resolved, additions: Additions = NO_ADDITIONS) -> Iterator[Run]:
    """Set up every part of a training, in order, and release them after the block. Collective over all ranks.

    Args:
        groups: this rank's process groups.
        resolved: the configuration.
        additions: what a program adds to it.
    """
    storage = find_storage(resolved.config.checkpoint, groups)
    with (
        reported_progress(groups.world.rank) as progress,
        claim_folder(resolved.config.checkpoint.save, groups, storage),
        recorded_memory(
            resolved.config.logging, groups, progress, last_iteration=resolved.update.iterations
        ) as memory,
    ):
        training, position = _build_training(groups, resolved, storage, progress, additions)
        with _opened(training, position, progress, memory, additions) as run:
            yield run


def _build_training(
    groups: Groups, resolved: Resolved, storage: Storage, progress: Progress, additions: Additions
) -> tuple[Training, Position]:
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
    datasets = build_datasets(resolved, position=position, difficulties=additions.difficulties)
    progress.describe(phase="building the model")
    model = build_model(resolved.model, resolved.run, groups, vocab_size=tokenizer.vocab_size)
    backends = attention_backends(resolved.model, resolved.run, computing_device())
    log_backends(backends)
    recorded = recorded_values(resolved, fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size)
    start_from_teacher(
        config.compression.compression_training.layer_reduction,
        resolved.model.kinds,
        model,
        load=load,
        groups=groups,
        recorded=recorded,
        writable=partial(gathered_parameter, groups=groups),
    )
    additions.fill(model, groups)
    load_towers(
        config.objective.bert_load if resolved.data.objective == "ict" else None,
        model,
        tower_names=(QUERY, BLOCK),
        load=load,
        groups=groups,
        config=recorded,
        writable=partial(gathered_parameter, groups=groups),
    )
    base = load_base(
        base_of_adapters(config),
        model,
        adapters=load,
        groups=groups,
        config=recorded,
        writable=partial(gathered_parameter, groups=groups),
        cache=config.checkpoint.store_cache,
    )
    optimizer = build_optimizer(
        resolved.update.optimizer, resolved.run, model, model_group=groups.model, data_group=groups.data
    )
    curve = resolved.update.curve
    assert curve is not None, "the number of iterations is known where the data is read"
    schedule = LearningRateSchedule(optimizer, curve)
    engine = build_engine(resolved.run, resolved.update, model, optimizer, schedule, groups=groups)
    add_distillation(resolved, model, groups=groups, recorded=recorded, vocab_size=tokenizer.vocab_size)
    progress.describe(phase="compiling the layers")
    compile_layers(
        model, resolved.run, groups, width=resolved.model.width, iterations=config.training.iterations
    )
    seed_streams(config.training.seed, groups)
    eigenvalues = build_eigenvalues(
        config.engine.eigenvalue,
        engine,
        groups,
        seed=config.training.seed,
        owners=[layer.owner for layer in resolved.model.layers],
    )
    compression = build_compression(resolved.run, engine, groups, eigenvalues)
    section, losses = config.training, None
    if section.on_spike is not None:
        losses = RecentLosses(section.spike_window, engine.device)
    training = Training(
        resolved=resolved,
        groups=groups,
        engine=engine,
        schedule=schedule,
        state=TrainState(
            last_iteration=section.iterations,
            samples_per_iteration=resolved.run.batch.whole,
            recent_losses=losses,
        ),
        # What was downloaded is whole on every host.
        storage=storage,
        tokenizer=tokenizer,
        datasets=datasets,
        load=load,
        uploads=uploads,
        base=base,
        difficulties=additions.difficulties,
        texts=texts,
        compression=compression,
        eigenvalues=eigenvalues,
        attention={backend.kind: backend.name for backend in backends},
        model_states=[
            *([] if eigenvalues is None else eigenvalues.states()),
            *([] if compression is None else compression.states()),
        ],
    )
    return training, position


@contextmanager
def _opened(
    training: Training,
    position: Position,
    progress: Progress,
    memory: MemoryHook | None,
    additions: Additions,
) -> Iterator[Run]:
    """Load the checkpoint, open what must be closed after the training, and build its loop."""
    resolved, groups, state = training.resolved, training.groups, training.state
    config = resolved.config
    progress.describe(phase="loading the checkpoint" if config.checkpoint.load else "preparing the data")
    resumes = load_into(training, position)
    reduction = config.compression.compression_training.layer_reduction
    first = first_weights(resolved.data, reduction) or additions.source
    weights = config.checkpoint.load if resumes else first
    add_left_out(training)
    if training.compression is not None:
        training.compression.start(state.iteration)
    if state.finished:
        logger.info("all %d iterations are finished: only evaluation remains", state.last_iteration)
    streams = open_streams(
        resolved.data,
        resolved.run,
        samples_of_objective(training.datasets, resolved.data, training.tokenizer),
        groups,
        vocab_size=resolved.model.embedding.entries(training.tokenizer.vocab_size),
        end_of_document=training.tokenizer.end_of_document,
        largest_id=training.tokenizer.largest_id,
        difficulties=training.difficulties,
    )
    step = build_step(training)
    batch = resolved.run.batch
    evaluator = Evaluator(
        step.evaluate,
        streams,
        iterations=config.training.eval_iters,
        accumulation=batch.accumulation,
        samples_per_iteration=batch.whole,
        characters=character_count(config.generation, training.tokenizer, groups),
        retrieval=retrieval_model(training.engine.model),
    )
    forward = build_forward_check(training, step, streams)
    if forward is not None and resumes and not config.checkpoint.finetune:
        forward.compare(state.forward_pass, source=f"{config.checkpoint.load}, iteration {state.iteration}")
    state.forward_pass = None
    with ExitStack() as resources:
        batches = resources.enter_context(closing(streams["train"](state.samples, state.iteration)))
        opened: list[MetricWriter] = []
        if groups.world.rank == 0:
            opened = open_writers(
                config.logging,
                config.monitors,
                config.checkpoint,
                last_iteration=config.training.iterations,
                batch=batch.whole,
                values=flat_values(config),
                position=state.position,
            )
        writers = [resources.enter_context(closing(writer)) for writer in opened]
        events = resources.enter_context(_run_events(training, writers, weights=weights))
        outputs = Outputs(writers=writers, progress=progress, events=events)
        background = build_background_saves(
            config.checkpoint, groups, training.engine.device, patience=config.launch.hang_timeout
        )
        if background is not None:
            resources.callback(background.close)
        if training.uploads is not None:
            resources.enter_context(closing(training.uploads))
        saves_start = not has_start(config.checkpoint, resumes)
        hooks, before_save = build_hooks(
            training, evaluator, outputs, background, saves_start=saves_start, forward=forward
        )
        hooks += additions.hooks
        measured = profilers(
            config.logging,
            config.engine.comms_logger,
            training.engine,
            groups,
            progress,
            memory,
            last_iteration=config.training.iterations,
        )
        hooks += resources.enter_context(measured)
        yield Run(
            training=training,
            loop=Loop(state, step, *_recorded(training, batches, hooks)),
            evaluator=evaluator,
            before_save=before_save,
            progress=progress,
        )


@contextmanager
def _run_events(
    training: Training, writers: Sequence[MetricWriter], *, weights: str | None
) -> Iterator[Events]:
    """Record the start of this attempt and, after the context, its end and the reason."""
    events, state = Events(writers), training.state
    if events.are_recorded:
        try:
            about = about_run(training, weights=weights)
        except _NOT_DESCRIBED:
            # A report must not end a training.
            logger.exception("the record does not describe this attempt, training continues")
        else:
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
    training: Training, batches: Iterator[Batch], hooks: list[Hook]
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
        save=None if snapshot is None else partial(save_training, training, snapshot),
    )
    return recorder.watch(batches), [*hooks, recorder]

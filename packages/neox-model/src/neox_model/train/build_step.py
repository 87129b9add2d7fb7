"""Build the training step and what wraps it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from hashlib import sha256
from itertools import islice

from torch.distributed import ReduceOp

from neox_config.derive.curricula import length_schedule
from neox_config.estimate import flops_per_token
from neox_config.schema.sections.engine import Eigenvalue
from neox_config.schema.sections.training import TrainingSection
from neox_config.spec.run import RunSpec
from neox_model.assembly.choices import DTYPES
from neox_model.assembly.compression import snip_rules
from neox_model.checkpoint.outcome import gather
from neox_model.engine.contract import Engine
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.groups import Group, Groups
from neox_model.train.compression import TrainedCompression
from neox_model.train.data.streams import Stream, choose_weighting
from neox_model.train.eigenvalues import Eigenvalues, MeasuringStep
from neox_model.train.empty_batches import EmptyMicroBatches
from neox_model.train.engine_step import EngineStep
from neox_model.train.evaluate import Evaluator
from neox_model.train.flops_profile import ProfiledStep
from neox_model.train.forward_check import ForwardCheck
from neox_model.train.hooks.record import sample_digests
from neox_model.train.recent_losses import RecentLosses
from neox_model.train.spikes import LeftOutBatches, SpikeDetection
from neox_model.train.step import TrainStep
from neox_model.train.training import Training
from neox_model.train.varying_lengths import VaryingLengths

__all__ = [
    "build_compression",
    "build_eigenvalues",
    "build_forward_check",
    "build_step",
]


def build_step(training: Training) -> TrainStep:
    """Build the step of one iteration, with all that is configured around it."""
    batch = training.resolved.run.batch
    step: TrainStep = EngineStep(
        training.engine,
        accumulation=batch.accumulation,
        tokens=batch.whole * batch.length,
        weighting=choose_weighting(training.resolved.update.normalization, training.groups),
    )
    step = _with_lengths(training, _with_eigenvalues(training, _with_warning(training, step)))
    if training.state.recent_losses is not None:
        step = _with_spikes(
            step,
            training.state.recent_losses,
            training.config.training,
            training.engine,
            training.groups.model,
        )
    return LeftOutBatches(
        _with_profile(training, step),
        accumulation=batch.accumulation,
        is_left_out=lambda: training.state.leaves_out_next,
    )


def _with_warning(training: Training, step: TrainStep) -> TrainStep:
    """Wrap the step to warn of micro-batches without a target, if there may be some and they are averaged."""
    config, state = training.config, training.state
    data, is_masked = config.data, training.resolved.data.objective == "masked"
    has_labels = data.train_label_data_paths is not None
    leaves_out = data.eod_mask_loss or has_labels or data.pack_impl != "packed" or is_masked
    if not leaves_out or config.training.loss_normalization != "micro_batch":
        return step

    def is_due() -> bool:
        following = state.iteration + 1
        return following % config.logging.log_interval == 0 or following == state.last_iteration

    return EmptyMicroBatches(step, training.groups, is_due=is_due)


def _with_eigenvalues(training: Training, step: TrainStep) -> TrainStep:
    """Wrap the step to measure eigenvalues, if it is configured."""
    if training.eigenvalues is None:
        return step
    return MeasuringStep(
        step,
        training.eigenvalues,
        state=training.state,
        interval=training.config.engine.eigenvalue.gas_boundary_resolution,
        accumulation=training.resolved.run.batch.accumulation,
        weighting=choose_weighting(training.resolved.update.normalization, training.groups),
        device=training.engine.device,
    )


def _with_lengths(training: Training, step: TrainStep) -> TrainStep:
    """Wrap the step for a curriculum's sequence lengths, if one is configured."""
    resolved = training.resolved
    schedule = length_schedule(resolved.data.efficiency, training.difficulties)
    if schedule is None:
        return step
    return VaryingLengths(
        step,
        tokens=lambda: resolved.run.batch.whole * schedule(training.state.iteration),
        forget_shapes=training.engine.forget_shapes,
    )


def _with_spikes(
    step: TrainStep, losses: RecentLosses, section: TrainingSection, engine: Engine, group: Group
) -> TrainStep:
    """Wrap the step to detect loss spikes."""
    return SpikeDetection(
        step,
        losses,
        threshold=section.spike_threshold,
        skips=engine.update if section.on_spike == "skip" else None,
        agreed=lambda loss: all_reduce(loss.detach().clone(), group, ReduceOp.MAX),
    )


def _with_profile(training: Training, step: TrainStep) -> TrainStep:
    """Wrap the step to count the operations of an iteration, if it is configured."""
    section = training.config.engine.flops_profiler
    if not section.enabled:
        return step
    model, run = training.resolved.model, training.resolved.run

    def formula(tokens: int) -> int:
        return tokens * flops_per_token(
            model,
            entries=model.embedding.entries(training.tokenizer.vocab_size),
            length=tokens // run.batch.whole,
            is_recomputed=run.recomputation.segment is not None,
            recomputes_attention=run.recomputation.attention,
        )

    return ProfiledStep(
        step,
        section,
        engine=training.engine,
        groups=training.groups,
        state=training.state,
        formula=formula,
    )


def build_eigenvalues(
    section: Eigenvalue, engine: Engine, groups: Groups, *, seed: int, owners: Sequence[int | None]
) -> Eigenvalues | None:
    """Build what measures eigenvalues; None if nothing does."""
    if not section.enabled:
        return None
    whole = [number if owner is None else owner for number, owner in enumerate(owners)]
    return Eigenvalues(engine.model, section, data=groups.data, seed=seed, owners=whole)


def build_compression(
    run: RunSpec, engine: Engine, groups: Groups, eigenvalues: Eigenvalues | None = None
) -> TrainedCompression | None:
    """Build what compresses the model in training; None if nothing does."""
    if not run.compressible:
        return None
    dtype, rules = DTYPES[run.precision.weights], snip_rules(run.compression, run.compressible)
    if eigenvalues is None:
        return TrainedCompression(engine, groups, dtype=dtype, snip=rules)
    return TrainedCompression(engine, groups, dtype=dtype, snip=rules, factors=eigenvalues.factor)


def build_forward_check(
    training: Training, step: TrainStep, streams: Mapping[str, Callable[..., Stream]]
) -> ForwardCheck | None:
    """Build the comparison of a loaded checkpoint's loss with the saved one, if it is configured."""
    if not training.config.checkpoint.checkpoint_validation_with_forward_pass:
        return None
    batch = training.resolved.run.batch
    evaluator = Evaluator(
        step.evaluate,
        streams,
        iterations=1,
        accumulation=batch.accumulation,
        samples_per_iteration=batch.whole,
    )
    return ForwardCheck(
        lambda: evaluator.evaluate("train", 0).loss,
        partial(_digest_of_first_batch, streams["train"], batch.accumulation, training.groups.control),
        samples=batch.whole,
        computes_in=training.resolved.run.precision.computes_in,
    )


def _digest_of_first_batch(open_stream: Callable[..., Stream], accumulation: int, control: Group) -> str:
    """Digest the samples of the first batch on every rank. Collective over all ranks."""
    with closing(open_stream(0)) as stream:
        batches = list(islice(stream, accumulation))
    held = [digest for batch in batches for digest in sample_digests(batch)]
    found = {digest for digests in gather(control, held) for digest in digests}
    return sha256(" ".join(sorted(found)).encode()).hexdigest()[:16]

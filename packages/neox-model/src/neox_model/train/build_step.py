"""Build the training step and what wraps it."""

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from hashlib import sha256
from itertools import islice

from torch.distributed import ReduceOp

from neox_config import NeoXConfig, Resolved
from neox_config.derive.curricula import length_schedule
from neox_config.derive.objective import is_masked
from neox_config.estimate import flops_per_token
from neox_model.assembly.choices import DTYPES
from neox_model.assembly.compression import snip_rules
from neox_model.checkpoint.outcome import gather
from neox_model.engine.contract import Engine
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.groups import Groups
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
    "build_recent_losses",
    "build_step",
]


def build_step(training: Training) -> TrainStep:
    """Build the step of one iteration, with all that is configured around it."""
    derived = training.resolved.derived
    step: TrainStep = EngineStep(
        training.engine,
        accumulation=derived.accumulation,
        tokens=derived.train_batch_size * training.config.model.seq_length,
        weighting=choose_weighting(training.resolved.update.normalization, training.groups),
    )
    step = _with_lengths(training, _with_eigenvalues(training, _with_warning(training, step)))
    return LeftOutBatches(
        _with_profile(training, _with_spikes(training, step)),
        accumulation=derived.accumulation,
        is_left_out=lambda: training.state.leaves_out_next,
    )


def _with_warning(training: Training, step: TrainStep) -> TrainStep:
    """Wrap the step to warn of micro-batches without a target, if there may be some and they are averaged."""
    config, state = training.config, training.state
    data = config.data
    has_labels = data.train_label_data_paths is not None
    leaves_out = data.eod_mask_loss or has_labels or data.pack_impl != "packed" or is_masked(config)
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
        accumulation=training.resolved.derived.accumulation,
        weighting=choose_weighting(training.resolved.update.normalization, training.groups),
        device=training.engine.device,
    )


def _with_lengths(training: Training, step: TrainStep) -> TrainStep:
    """Wrap the step for a curriculum's sequence lengths, if one is configured."""
    schedule, derived = (
        length_schedule(training.resolved.data.efficiency, training.difficulties),
        training.resolved.derived,
    )
    if schedule is None:
        return step
    return VaryingLengths(
        step,
        tokens=lambda: derived.train_batch_size * schedule(training.state.iteration),
        forget_shapes=training.engine.forget_shapes,
    )


def _with_spikes(training: Training, step: TrainStep) -> TrainStep:
    """Wrap the step to detect loss spikes, if `on_spike` is set."""
    section, losses = training.config.training, training.state.recent_losses
    if losses is None:
        return step
    update = training.engine.update if section.on_spike == "skip" else None
    group = training.groups.model
    return SpikeDetection(
        step,
        losses,
        threshold=section.spike_threshold,
        skips=update,
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


def build_recent_losses(config: NeoXConfig, engine: Engine) -> RecentLosses | None:
    """Build the memory of recent losses that spikes are compared with; None without `on_spike`."""
    section = config.training
    return None if section.on_spike is None else RecentLosses(section.spike_window, engine.device)


def build_eigenvalues(resolved: Resolved, engine: Engine, groups: Groups) -> Eigenvalues | None:
    """Build what measures eigenvalues; None if nothing does."""
    section = resolved.config.engine.eigenvalue
    if not section.enabled:
        return None
    return Eigenvalues(
        engine.model,
        section,
        data=groups.data,
        seed=resolved.config.training.seed,
        owners=resolved.derived.weight_owners,
    )


def build_compression(
    resolved: Resolved, engine: Engine, groups: Groups, eigenvalues: Eigenvalues | None = None
) -> TrainedCompression | None:
    """Build what compresses the model in training; None if nothing does."""
    run = resolved.run
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
        partial(_digest_of_first_batch, training, streams["train"]),
        samples=derived.train_batch_size,
        computes_in=derived.computes_in,
    )


def _digest_of_first_batch(training: Training, open_stream: Callable[..., Stream]) -> str:
    """Digest the samples of the first batch on every rank. Collective over all ranks."""
    with closing(open_stream(0)) as stream:
        batches = list(islice(stream, training.resolved.derived.accumulation))
    held = [digest for batch in batches for digest in sample_digests(batch)]
    found = {digest for digests in gather(training.groups.control, held) for digest in digests}
    return sha256(" ".join(sorted(found)).encode()).hexdigest()[:16]

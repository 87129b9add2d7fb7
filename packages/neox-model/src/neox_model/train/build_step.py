"""Build the training step and what wraps it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from hashlib import sha256
from itertools import islice

from torch.distributed import ReduceOp

from neox_config.estimate import flops_per_token
from neox_config.extras.data_efficiency.curricula import length_schedule
from neox_config.schema.sections.engine import Eigenvalue
from neox_config.spec.run import RunSpec
from neox_model.assembly.choices import DTYPES
from neox_model.checkpoint.outcome import gather
from neox_model.engine.contract import Engine
from neox_model.extras.compression.attach import snip_rules
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.groups import Groups
from neox_model.train.compression import TrainedCompression
from neox_model.train.data.streams import Stream, choose_weighting
from neox_model.train.eigenvalues import Eigenvalues, MeasuringStep
from neox_model.train.evaluate import Evaluator
from neox_model.train.flops_profile import ProfiledStep
from neox_model.train.forward_check import ForwardCheck
from neox_model.train.hooks.record import sample_digests
from neox_model.train.step import EngineStep, TrainStep
from neox_model.train.training import Training
from neox_model.train.wrapped_steps import (
    EmptyMicroBatches,
    LeftOutBatches,
    SpikeDetection,
    VaryingLengths,
)

__all__ = [
    "build_compression",
    "build_eigenvalues",
    "build_forward_check",
    "build_step",
]


def build_step(training: Training) -> TrainStep:
    """Build the step of one iteration, with all that is configured around it."""
    resolved, config, engine, state = training.resolved, training.config, training.engine, training.state
    batch, section = resolved.run.batch, config.training
    weighting = choose_weighting(resolved.update.normalization, training.groups)
    step: TrainStep = EngineStep(
        engine, accumulation=batch.accumulation, tokens=batch.whole * batch.length, weighting=weighting
    )
    if section.loss_normalization == "micro_batch" and _may_have_no_target(training):

        def is_due() -> bool:
            following = state.iteration + 1
            return following % config.logging.log_interval == 0 or following == state.last_iteration

        step = EmptyMicroBatches(step, training.groups, is_due=is_due)
    if training.eigenvalues is not None:
        step = MeasuringStep(
            step,
            training.eigenvalues,
            state=state,
            interval=config.engine.eigenvalue.gas_boundary_resolution,
            accumulation=batch.accumulation,
            weighting=weighting,
            device=engine.device,
        )
    schedule = length_schedule(resolved.data.efficiency, training.difficulties)
    if schedule is not None:
        step = VaryingLengths(
            step,
            tokens=lambda: batch.whole * schedule(state.iteration),
            forget_shapes=engine.forget_shapes,
        )
    if state.recent_losses is not None:
        step = SpikeDetection(
            step,
            state.recent_losses,
            threshold=section.spike_threshold,
            skips=engine.update if section.on_spike == "skip" else None,
            agreed=lambda loss: all_reduce(loss.detach().clone(), training.groups.model, ReduceOp.MAX),
        )
    if config.engine.flops_profiler.enabled:
        step = ProfiledStep(
            step,
            config.engine.flops_profiler,
            engine=engine,
            groups=training.groups,
            state=state,
            formula=lambda tokens: _expected_flops(training, tokens),
        )
    return LeftOutBatches(step, accumulation=batch.accumulation, is_left_out=lambda: state.leaves_out_next)


def _may_have_no_target(training: Training) -> bool:
    """Return whether a micro-batch may contain no token that counts in the loss."""
    data = training.config.data
    leaves_out = data.eod_mask_loss or data.train_label_data_paths is not None
    return leaves_out or data.pack_impl != "packed" or training.resolved.data.objective == "masked"


def _expected_flops(training: Training, tokens: int) -> int:
    """Return the operations of an iteration with this many tokens, over all ranks, by the formula."""
    model, run = training.resolved.model, training.resolved.run
    return tokens * flops_per_token(
        model,
        entries=model.embedding.entries(training.tokenizer.vocab_size),
        length=tokens // run.batch.whole,
        is_recomputed=run.recomputation.segment is not None,
        recomputes_attention=run.recomputation.attention,
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
    return TrainedCompression(
        engine,
        groups,
        dtype=DTYPES[run.precision.weights],
        snip=snip_rules(run.compression, run.compressible),
        factors=(lambda name: 1) if eigenvalues is None else eigenvalues.factor,
    )


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

    def digest_of_first_batch() -> str:
        with closing(streams["train"](0)) as stream:
            batches = list(islice(stream, batch.accumulation))
        held = [digest for batch in batches for digest in sample_digests(batch)]
        found = {digest for digests in gather(training.groups.control, held) for digest in digests}
        return sha256(" ".join(sorted(found)).encode()).hexdigest()[:16]

    return ForwardCheck(
        lambda: evaluator.evaluate("train", 0).loss,
        digest_of_first_batch,
        samples=batch.whole,
        computes_in=training.resolved.run.precision.computes_in,
    )

"""The callbacks of a run, in their order."""

from collections.abc import Callable
from pkgutil import resolve_name

from neox_model.train.callbacks.average import WeightAverage
from neox_model.train.callbacks.checkpoint import CheckpointCallback, UploadCallback
from neox_model.train.callbacks.evaluate import EvaluateCallback, ReserveCallback
from neox_model.train.callbacks.experts import ExpertBalance
from neox_model.train.callbacks.flops_profile import FlopsCallback
from neox_model.train.callbacks.forward_check import ForwardCheck
from neox_model.train.callbacks.guard import NonfiniteGuard
from neox_model.train.callbacks.log import LogCallback
from neox_model.train.callbacks.profilers import CollectivesCallback, MemoryCallback, ProfileCallback
from neox_model.train.callbacks.progress import ProgressCallback
from neox_model.train.callbacks.record import RecordCallback
from neox_model.train.callbacks.replica_check import ReplicaCheck
from neox_model.train.callbacks.spikes import SpikeDetection, SpikeHandler
from neox_model.train.callbacks.steps import LeftOutBatches, VaryingLengths, ZLoss
from neox_model.train.callbacks.stop import AutoresumeCallback, StopCallback
from neox_model.train.callbacks.stragglers import StragglersCallback
from neox_model.train.callbacks.tensors import (
    GradientFigures,
    GradientNoise,
    TensorNorms,
)
from neox_model.train.callbacks.upkeep import GarbageCollection
from neox_model.train.run import Callback, Extensions, Run

__all__ = ["add_callbacks"]

Build = Callable[[Run], Callback | None]


def _extra(name: str, is_requested: Callable[[Run], bool]) -> Build:
    """Return what builds a callback of an extra, whose module is imported if a run requests it."""
    return lambda run: resolve_name(name).from_run(run) if is_requested(run) else None


_CALLBACKS: tuple[Build, ...] = (
    # First, so that what the others do does not count as the time of the step.
    ProgressCallback.from_run,
    # Around the step: a later one is outside of the earlier ones.
    _extra(
        "neox_model.extras.eigenvalues.measure:EigenvaluesCallback",
        lambda run: run.config.engine.eigenvalue.enabled,
    ),
    ZLoss.from_run,
    ExpertBalance.from_run,
    VaryingLengths.from_run,
    SpikeDetection.from_run,
    FlopsCallback.from_run,
    LeftOutBatches.from_run,
    # Before all that use the model after an iteration, or save it.
    _extra(
        "neox_model.extras.compression.training:CompressionCallback",
        lambda run: bool(run.resolved.run.compressible),
    ),
    WeightAverage.from_run,
    AutoresumeCallback.from_run,
    StopCallback.from_run,
    # Before the log, which resets peaks of memory.
    StragglersCallback.from_run,
    LogCallback.from_run,
    ReplicaCheck.from_run,
    SpikeHandler.from_run,
    NonfiniteGuard.from_run,
    ForwardCheck.from_run,
    ReserveCallback.from_run,
    TensorNorms.from_run,
    GradientFigures.from_run,
    GradientNoise.from_run,
    # Saves follow the logging of an iteration, and evaluations, which may fail, follow its save.
    CheckpointCallback.from_run,
    EvaluateCallback.from_run,
    _extra(
        "neox_model.extras.token_dropping.callback:DropTokens",
        lambda run: run.config.data_efficiency.data_efficiency.enabled,
    ),
    GarbageCollection.from_run,
    UploadCallback.from_run,
)

# They measure and record what all others do.
_LAST: tuple[Build, ...] = (ProfileCallback.from_run, CollectivesCallback.from_run, RecordCallback.from_run)


def add_callbacks(run: Run, extensions: Extensions, memory: MemoryCallback | None) -> None:
    """Build the callbacks that the configuration requests, and add them to the run. Collective.

    Args:
        run: the run, whose checkpoint is not loaded yet.
        extensions: what a program adds.
        memory: records allocations already; None: it is not requested.
    """
    for build in _CALLBACKS:
        _add(run, build(run))
    for callback in extensions.callbacks:
        run.add(callback)
    _add(run, memory)
    for build in _LAST:
        _add(run, build(run))


def _add(run: Run, callback: Callback | None) -> None:
    if callback is not None:
        run.add(callback)

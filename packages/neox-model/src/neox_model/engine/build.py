"""Build the engine that the configuration chooses."""

import logging

from torch import nn
from torch.optim import Optimizer

from neox_config.spec.run import RunSpec
from neox_config.spec.update import UpdateSpec
from neox_model.assembly.engines import engine_module
from neox_model.engine.contract import Engine, ForwardEngine
from neox_model.engine.mean_loss import PlainForward
from neox_model.layers.experts import Router
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import Groups

__all__ = ["build_engine", "build_forward", "prepare_engine"]

logger = logging.getLogger(__name__)


def prepare_engine(run: RunSpec) -> None:
    """Log which engine is chosen and why, and prepare it; torch's of one process is not worth a line.

    Call it after `torch.distributed` is initialized and before the model is built.
    """
    engine = run.engine
    is_plain = engine.name == "torch" and run.layout.world == 1
    level = logging.DEBUG if is_plain else logging.INFO
    logger.log(level, "the engine is %s: %s", engine.name, engine.reason)
    module = engine_module(run)
    if hasattr(module, "prepare"):
        module.prepare()


def build_engine(
    run: RunSpec,
    update: UpdateSpec,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    *,
    groups: Groups,
) -> Engine:
    """Build the engine that trains, with our optimizer and schedule. Collective over all ranks.

    Args:
        run: how the model runs.
        update: how its weights are updated.
        model: this rank's part of the model, plain or a stage of a pipeline; float32, cast here.
        optimizer: over the model's parameters.
        schedule: advanced after each applied update.
        groups: this rank's process groups.
    """
    engine: Engine = engine_module(run).build(run, update, model, optimizer, schedule, groups=groups)
    for module in model.modules():
        if isinstance(module, Router):
            module.loss_scale = lambda: engine.update.loss_scale
            module.replicas = groups.data
    return engine


def build_forward(run: RunSpec, model: nn.Module, *, groups: Groups) -> ForwardEngine:
    """Build an engine for evaluation only; the model keeps its dtype and device."""
    if not run.layout.is_pipeline:
        return PlainForward(model, groups.data)
    forward: ForwardEngine = engine_module(run).build_forward(run.batch, model, groups=groups)
    return forward

"""The master weights and the loss scale of each update, and the counters of an engine."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from neox_config.facts.learning_rate import WarmupThenDecay
from neox_model.deepspeed_compat import zero_masters_to_model
from neox_model.engine.deepspeed_engine import PlainEngine, ZeroUpdate
from neox_model.engine.own_update import OwnUpdate
from neox_model.errors import ModelError
from neox_model.optim.loss_scale import LossScale, LossScaleSettings
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.optim.mixed_precision import MixedPrecisionOptimizer
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK

CPU = torch.device("cpu")


def own_update(model: nn.Module) -> OwnUpdate:
    optimizer = torch.optim.AdamW(model.parameters())
    curve = WarmupThenDecay(style="constant", peak=0.1, floor=0.0, warmup=0.0, decay_iterations=9)
    mixed = MixedPrecisionOptimizer(
        optimizer,
        LearningRateSchedule(optimizer, curve),
        dtype=torch.float16,
        accumulation_dtype=torch.float16,
        max_norm=0.0,
        reduce=lambda gradients: None,
        groups=SINGLE_PROCESS,
        loss_scale=LossScale(LossScaleSettings(initial=2.0**16, is_dynamic=True), CPU),
    )
    return OwnUpdate(mixed, model, SINGLE_PROCESS)


def own_engine() -> PlainEngine:
    inner = SimpleNamespace(global_steps=0, global_samples=0)
    return PlainEngine(inner, own_update(nn.Linear(3, 2)), SINGLE_RANK)


def zero_engine(**scaler: object) -> PlainEngine:
    """Return an engine as under ZeRO, with this state of DeepSpeed's loss scaler."""
    optimizer = SimpleNamespace(loss_scaler=SimpleNamespace(**scaler))
    inner = SimpleNamespace(optimizer=optimizer, global_steps=0, global_samples=0)
    return PlainEngine(inner, ZeroUpdate(inner, min_loss_scale=None), SINGLE_RANK)


def test_the_float32_masters_of_stage_0():
    model = nn.Linear(3, 2)
    update = own_update(model)
    held = list(update.held())
    assert [(run.param, run.holder) for run in held] == list(
        zip(model.parameters(), update.mixed.masters, strict=True)
    )
    assert [(run.start, run.numel, run.offset) for run in held] == [(0, 6, 0), (0, 2, 0)]
    assert {run.holder.dtype for run in held} == {torch.float32}
    assert update.optimizer is update.mixed.optimizer
    with torch.no_grad():
        update.mixed.masters[1].copy_(torch.tensor([1.0, 2.0]))
    update.to_model()
    assert model.bias.tolist() == [1.0, 2.0]
    assert model.bias.dtype == torch.float16
    assert not update.splits_over_data


def test_an_unknown_wrapper_is_named():
    with pytest.raises(ModelError, match="cannot checkpoint the engine's optimizer class SimpleNamespace"):
        list(zero_engine().update.held())
    with pytest.raises(ModelError, match="supported: BF16_Optimizer, DeepSpeedZeroOptimizer"):
        zero_masters_to_model(SimpleNamespace())


def test_states_on_nvme_are_refused():
    inner = SimpleNamespace(optimizer=SimpleNamespace(swap_optimizer=True))
    with pytest.raises(ModelError, match="offloaded to nvme cannot be checkpointed"):
        list(ZeroUpdate(inner, min_loss_scale=None).held())


def test_a_dynamic_loss_scale_continues_from_zeros_to_ours_and_back():
    stored = zero_engine(dynamic=True, cur_scale=64.0, cur_iter=9, last_overflow_iter=5, cur_hysteresis=1)
    stored.load_state_dict({"global_steps": 9, "global_samples": 36}, loss_scale=True)
    state = stored.state_dict()
    assert state["cur_scale"] == 64.0
    ours = own_engine()
    ours.load_state_dict(state, loss_scale=True)
    assert float(ours.update.loss_scale) == 64.0
    assert ours.state_dict() == state
    ours.load_state_dict(state | {"cur_scale": 2.0}, loss_scale=False)
    assert ours.state_dict() == state
    fresh = zero_engine(dynamic=True, cur_scale=1024.0, cur_iter=0, last_overflow_iter=-1, cur_hysteresis=2)
    fresh.load_state_dict(state, loss_scale=True)
    assert fresh.state_dict() == state


@pytest.mark.parametrize(("dynamic", "loss_scale"), [(False, True), (True, False)])
def test_fixed_or_absent_loss_scale_is_unchanged(dynamic, loss_scale):
    fresh = zero_engine(dynamic=dynamic, cur_scale=1024.0, cur_iter=0, last_overflow_iter=-1)
    state = {"global_steps": 1, "global_samples": 1, "cur_scale": 1.0, "cur_iter": 1}
    fresh.load_state_dict(state, loss_scale=loss_scale)
    assert fresh.update._inner.optimizer.loss_scaler.cur_scale == 1024.0


def test_a_scale_that_cannot_change_is_not_recorded_and_starts_no_float16_run():
    """DeepSpeed gives ZeRO in fp32 and bf16 a scaler that stays at 1."""
    static = zero_engine(dynamic=False, cur_scale=1.0)
    assert static.state_dict() == {"global_steps": 0, "global_samples": 0}
    ours = own_engine()
    # As an older version recorded it.
    ours.load_state_dict({"global_steps": 1, "global_samples": 1, "cur_scale": 1.0}, loss_scale=True)
    assert float(ours.update.loss_scale) == 2.0**16

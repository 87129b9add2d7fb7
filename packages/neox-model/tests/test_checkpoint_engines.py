"""Adapters for what a CPU cannot build, and the numbers of engines that are not tensors."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from neox_model.checkpoint.engines import (
    Held,
    adapter_of,
    inner_optimizer,
    read_engine_state,
    restore_engine_state,
    scalar_device,
)
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.logical import Fragment, optimizer_parts, restore_scalars, state_tensor
from neox_model.optim.loss_scale import LossScale, LossScaleSettings
from neox_model.optim.lr_schedule import LearningRateSchedule, WarmupThenDecay
from neox_model.optim.mixed_precision import MixedPrecisionOptimizer
from neox_model.parallel.groups import ALONE
from neox_model.parallel.logical import logical_parameter

CPU = torch.device("cpu")


def test_the_float32_masters_of_stage_0():
    model = nn.Linear(3, 2)
    update = mixed_precision(model, LossScale(LossScaleSettings(initial=8.0, is_dynamic=True), CPU))
    adapter = adapter_of(update)
    held = list(adapter.held(update))
    assert [(run.param, run.holder) for run in held] == list(
        zip(model.parameters(), update.masters, strict=True)
    )
    assert [(run.start, run.numel, run.offset) for run in held] == [(0, 6, 0), (0, 2, 0)]
    assert {run.holder.dtype for run in held} == {torch.float32}
    assert inner_optimizer(update) is update.optimizer
    with torch.no_grad():
        update.masters[1].copy_(torch.tensor([1.0, 2.0]))
    adapter.to_model(update)
    assert model.bias.tolist() == [1.0, 2.0]
    assert model.bias.dtype == torch.float16
    assert not adapter.splits_over_data


def mixed_precision(model: nn.Module, scale: LossScale) -> MixedPrecisionOptimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    curve = WarmupThenDecay(style="constant", peak=0.1, floor=0.0, warmup=0.0, decay_iterations=9)
    return MixedPrecisionOptimizer(
        optimizer,
        LearningRateSchedule(optimizer, curve),
        dtype=torch.float16,
        accumulation_dtype=torch.float16,
        max_norm=0.0,
        reduce=lambda gradients: None,
        groups=ALONE,
        loss_scale=scale,
    )


def test_an_unknown_wrapper_is_named():
    with pytest.raises(CheckpointError, match="no adapter for the engine's optimizer SimpleNamespace"):
        adapter_of(SimpleNamespace())


def engine(**scaler: object) -> SimpleNamespace:
    optimizer = SimpleNamespace(loss_scaler=SimpleNamespace(**scaler))
    return SimpleNamespace(optimizer=optimizer, global_steps=0, global_samples=0)


def test_a_dynamic_loss_scale_continues_from_zeros_to_ours_and_back():
    stored = engine(dynamic=True, cur_scale=64.0, cur_iter=9, last_overflow_iter=5, cur_hysteresis=1)
    stored.global_steps, stored.global_samples = 9, 36
    state = read_engine_state(stored)
    ours = engine()
    scale = LossScale(LossScaleSettings(initial=2.0**16, is_dynamic=True), CPU)
    ours.optimizer = mixed_precision(nn.Linear(3, 2), scale)
    restore_engine_state(ours, state, loss_scale=True)
    assert float(scale.value) == 64.0
    assert (ours.global_steps, ours.global_samples) == (9, 36)
    assert read_engine_state(ours) == state
    restore_engine_state(ours, state | {"cur_scale": 2.0}, loss_scale=False)
    assert read_engine_state(ours) == state


@pytest.mark.parametrize(("dynamic", "loss_scale"), [(False, True), (True, False)])
def test_a_loss_scale_that_is_fixed_or_not_asked_for_stays(dynamic, loss_scale):
    fresh = engine(dynamic=dynamic, cur_scale=1024.0, cur_iter=0, last_overflow_iter=-1)
    state = {"global_steps": 1, "global_samples": 1, "cur_scale": 1.0, "cur_iter": 1}
    restore_engine_state(fresh, state, loss_scale=loss_scale)
    assert fresh.optimizer.loss_scaler.cur_scale == 1024.0


class Counting(torch.optim.SGD):
    """An optimizer that counts in plain numbers, as DeepSpeed's do."""


def fragment_of(holder: torch.Tensor, name: str = "weight") -> Fragment:
    param = logical_parameter((4,), init=lambda tensor, generator: None)
    return Fragment(name, param.logical, Held(param, 0, 4, holder, 0))


def test_single_number_states_take_the_form_of_the_optimizer_that_goes_on():
    holder = nn.Parameter(torch.zeros(4))
    counting = Counting([holder], lr=0.1)
    counting.state[holder] = {"step": 3, "exp_avg": torch.ones(4), "nothing": None}
    parts, scalars = optimizer_parts(fragment_of(holder), counting)
    assert [part.name for part in parts] == ["weight/exp_avg"]
    assert scalars == {"step": {"value": 3, "dtype": None}, "nothing": {"value": None, "dtype": None}}
    adam = torch.optim.AdamW([holder])
    restore_scalars([fragment_of(holder)], adam, {"weight": {"step": scalars["step"]}}, same_class=False)
    assert torch.equal(adam.state[holder]["step"], torch.tensor(3.0))
    stored = {"weight": {"step": {"value": 3.0, "dtype": "F32"}}}
    restore_scalars([fragment_of(holder)], counting, stored, same_class=False)
    assert counting.state[holder]["step"] == 3
    assert isinstance(counting.state[holder]["step"], int)


def test_weights_of_one_flat_partition_must_have_counted_alike():
    holder = nn.Parameter(torch.zeros(8))
    stored = {name: {"step": {"value": step, "dtype": None}} for name, step in (("a", 1), ("b", 2))}
    fragments = [fragment_of(holder, "a"), fragment_of(holder, "b")]
    with pytest.raises(CheckpointError, match="states of a, b counted different updates"):
        restore_scalars(fragments, torch.optim.AdamW([holder]), stored, same_class=True)


def flat_part() -> Fragment:
    param = logical_parameter((4, 3), init=lambda tensor, generator: None)
    return Fragment("weight", param.logical, Held(param, 0, 12, nn.Parameter(torch.zeros(12)), 0))


def test_states_of_a_whole_weight_do_not_belong_to_a_flat_part_of_it():
    part = flat_part()
    optimizer = torch.optim.Adafactor([part.held.holder])
    optimizer.state[part.held.holder] = {"row_var": torch.zeros(4, 1)}
    with pytest.raises(CheckpointError, match=r"Adafactor keeps the state 'row_var' of weight as a tensor"):
        optimizer_parts(part, optimizer)
    with pytest.raises(CheckpointError, match=r"'row_var' of weight belongs to the whole .*stage: 0"):
        state_tensor(part, optimizer, "row_var", (4, 1))


def test_a_state_of_one_element_is_a_number_only_if_it_has_no_dimensions():
    param = logical_parameter((1, 3), init=lambda tensor, generator: None)
    fragment = Fragment("weight", param.logical, Held(param, 0, 3, param, 0))
    optimizer = torch.optim.Adafactor([param])
    optimizer.state[param] = {"step": torch.tensor(2.0), "row_var": torch.full((1, 1), 5.0)}
    parts, scalars = optimizer_parts(fragment, optimizer)
    assert [(part.name, part.shape, part.block) for part in parts] == [
        ("weight/row_var", (1, 1), ((0, 1), (0, 1)))
    ]
    assert scalars.keys() == {"step"}


def test_numbers_of_asgd_stay_beside_the_weights():
    holder = nn.Parameter(torch.zeros(2, device="meta"))
    assert scalar_device(torch.optim.ASGD([holder]), holder).type == "meta"
    assert scalar_device(torch.optim.NAdam([holder]), holder).type == "cpu"


def test_step_counters_stay_on_the_host_unless_the_update_is_one_kernel():
    holder = nn.Parameter(torch.zeros(2, device="meta"))
    assert scalar_device(torch.optim.AdamW([holder]), holder).type == "cpu"
    assert scalar_device(SimpleNamespace(param_groups=[{"fused": True}]), holder).type == "meta"


def test_a_scale_that_cannot_change_is_not_recorded_and_starts_no_float16_run():
    """DeepSpeed gives ZeRO in fp32 and bf16 a scaler that stays at 1."""
    assert read_engine_state(engine(dynamic=False, cur_scale=1.0)) == {"global_steps": 0, "global_samples": 0}
    scale = LossScale(LossScaleSettings(initial=2.0**16, is_dynamic=True), CPU)
    ours = engine()
    ours.optimizer = mixed_precision(nn.Linear(3, 2), scale)
    # As an older version recorded it.
    restore_engine_state(ours, {"global_steps": 1, "global_samples": 1, "cur_scale": 1.0}, loss_scale=True)
    assert float(scale.value) == 2.0**16

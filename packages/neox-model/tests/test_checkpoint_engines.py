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
from neox_model.checkpoint.logical import Fragment, optimizer_parts, restore_scalars
from neox_model.parallel.logical import logical_parameter


class FP16_Optimizer:  # noqa: N801
    """The layout of DeepSpeed's wrapper around fused optimizers: one flat master per group."""

    def __init__(self, groups: list[list[nn.Parameter]]) -> None:
        self.fp16_groups = groups
        self.fp32_groups_flat = [
            torch.cat([param.detach().float().view(-1) for param in group]) for group in groups
        ]
        self.optimizer = torch.optim.AdamW(self.fp32_groups_flat)


def test_the_flat_masters_of_fused_optimizers():
    first, second = nn.Parameter(torch.randn(2, 3).half()), nn.Parameter(torch.randn(4).half())
    wrapper = FP16_Optimizer([[first, second], [nn.Parameter(torch.zeros(1).half())]])
    adapter = adapter_of(wrapper)
    held = list(adapter.held(wrapper))
    assert [(run.numel, run.offset) for run in held] == [(6, 0), (4, 6), (1, 0)]
    assert [run.holder is wrapper.fp32_groups_flat[0] for run in held] == [True, True, False]
    assert inner_optimizer(wrapper) is wrapper.optimizer
    wrapper.fp32_groups_flat[0].copy_(torch.arange(10.0))
    adapter.to_model(wrapper)
    assert (first.tolist(), second.tolist()) == ([[0, 1, 2], [3, 4, 5]], [6, 7, 8, 9])
    assert not adapter.splits_over_data


def test_an_unknown_wrapper_is_named():
    with pytest.raises(CheckpointError, match="no adapter for the engine's optimizer SimpleNamespace"):
        adapter_of(SimpleNamespace())


def engine(**scaler: object) -> SimpleNamespace:
    optimizer = SimpleNamespace(loss_scaler=SimpleNamespace(**scaler))
    return SimpleNamespace(optimizer=optimizer, global_steps=0, global_samples=0, skipped_steps=0)


def test_a_dynamic_loss_scale_goes_on():
    stored = engine(dynamic=True, cur_scale=64.0, cur_iter=9, last_overflow_iter=5, cur_hysteresis=1)
    stored.global_steps, stored.global_samples, stored.skipped_steps = 9, 36, 1
    state = read_engine_state(stored)
    # The other kind of wrapper has no hysteresis, and another name for its scaler.
    other = engine()
    config = SimpleNamespace(dynamic_loss_scale=True, cur_scale=2.0**16, cur_iter=0, last_overflow_iter=-1)
    other.optimizer = SimpleNamespace(loss_scale_config=config)
    restore_engine_state(other, state, loss_scale=True)
    assert (config.cur_scale, config.cur_iter, config.last_overflow_iter) == (64.0, 9, 5)
    assert not hasattr(config, "cur_hysteresis")
    assert (other.global_steps, other.global_samples, other.skipped_steps) == (9, 36, 1)


@pytest.mark.parametrize(("dynamic", "loss_scale"), [(False, True), (True, False)])
def test_a_loss_scale_that_is_fixed_or_not_asked_for_stays(dynamic, loss_scale):
    fresh = engine(dynamic=dynamic, cur_scale=1024.0, cur_iter=0, last_overflow_iter=-1)
    state = {"global_steps": 1, "global_samples": 1, "skipped_steps": 0, "cur_scale": 1.0, "cur_iter": 1}
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


def test_step_counters_stay_on_the_host_unless_the_update_is_one_kernel():
    holder = nn.Parameter(torch.zeros(2, device="meta"))
    assert scalar_device(torch.optim.AdamW([holder]), holder).type == "cpu"
    assert scalar_device(SimpleNamespace(param_groups=[{"fused": True}]), holder).type == "meta"

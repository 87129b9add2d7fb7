"""The master weights and the loss scale of each update, and the counters of an engine."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from neox_config.facts.learning_rate import WarmupThenDecay
from neox_config.spec.update import LossScaling
from neox_model.engine.deepspeed.engines import PlainEngine
from neox_model.engine.deepspeed.zero import ZeroUpdate
from neox_model.engine.updater import Updater
from neox_model.errors import ModelError
from neox_model.optim.loss_scale import LossScale
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.optim.mixed_precision import MixedPrecisionOptimizer
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK
from support.refusals import refused

CPU = torch.device("cpu")


def updater(model: nn.Module) -> Updater:
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
        loss_scale=LossScale(LossScaling(initial=2.0**16, is_dynamic=True), CPU),
    )
    return Updater(mixed, model, SINGLE_PROCESS)


def own_engine() -> PlainEngine:
    inner = SimpleNamespace(module=None, global_steps=0, global_samples=0)
    return PlainEngine(inner, updater(nn.Linear(3, 2)), SINGLE_RANK)


def zero_engine(*, delayed_shift: int = 2, **scaler: object) -> PlainEngine:
    """Return an engine as under ZeRO, with this state of DeepSpeed's loss scaler."""
    optimizer = SimpleNamespace(loss_scaler=SimpleNamespace(delayed_shift=delayed_shift, **scaler))
    inner = SimpleNamespace(module=None, optimizer=optimizer, global_steps=0, global_samples=0)
    return PlainEngine(inner, ZeroUpdate(inner, min_loss_scale=None), SINGLE_RANK)


def test_the_float32_masters_of_stage_0():
    model = nn.Linear(3, 2)
    update = updater(model)
    held = list(update.param_shards())
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
    with refused(ModelError, "SimpleNamespace"):
        list(zero_engine().update.param_shards())
    with refused(ModelError, "BF16_Optimizer, DeepSpeedZeroOptimizer"):
        zero_engine().update.to_model()


class NvmeSwapper:
    """DeepSpeed's swapper of sub-groups, with a dict in place of the files."""

    def __init__(self, **files: list[torch.Tensor]) -> None:
        self.files = files
        self.buffers_in_use = 0
        empty = {name: [torch.zeros(0) for _ in tensors] for name, tensors in files.items()}
        self.swap_params_info = {
            name: SimpleNamespace(tensors=[SimpleNamespace(compute_tensor=tensor) for tensor in tensors])
            for name, tensors in empty.items()
        }

    def parameter_id(self, flat: torch.Tensor) -> str:
        return flat.name_of_file

    def swap_in_optimizer_state(self, flat: torch.Tensor) -> None:
        assert self.buffers_in_use == 0
        self.buffers_in_use = 1
        for held, stored in zip(self._tensors(flat), self.files[flat.name_of_file], strict=True):
            held.data = stored
        flat.grad = torch.ones_like(flat)

    def swap_out_optimizer_state(self, flat: torch.Tensor) -> None:
        self.files[flat.name_of_file] = [held.data.clone() for held in self._tensors(flat)]

    def release_swap_buffers(self, flat: torch.Tensor) -> None:
        self.buffers_in_use = 0
        for held in self._tensors(flat):
            held.data = torch.zeros(0)

    def _tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [each.compute_tensor for each in self.swap_params_info[flat.name_of_file].tensors]


def nvme_update() -> tuple[ZeroUpdate, NvmeSwapper]:
    swapper = NvmeSwapper(
        first=[torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], third=[torch.tensor([5.0])]
    )
    flats = [swapper.swap_params_info[name].tensors[0].compute_tensor for name in ("first", "third")]
    for flat, name in zip(flats, ("first", "third"), strict=True):
        flat.name_of_file = name
    optimizer = SimpleNamespace(
        swap_optimizer=True,
        optimizer_swapper=swapper,
        # DeepSpeed keeps small sub-groups in memory.
        fp32_partitioned_groups_flat=[flats[0], torch.tensor([9.0]), flats[1]],
        _swappable_optimizer_subgroup=lambda index: index != 1,
    )
    return ZeroUpdate(SimpleNamespace(optimizer=optimizer), min_loss_scale=None), swapper


@pytest.mark.parametrize("changes", [False, True])
def test_states_on_nvme_are_in_memory_within_the_block_and_written_back_if_they_change(changes):
    update, swapper = nvme_update()
    first, second, third = update._inner.optimizer.fp32_partitioned_groups_flat
    average = swapper.swap_params_info["first"].tensors[1].compute_tensor
    with update.in_memory(changes=changes):
        assert (first.tolist(), average.tolist(), third.tolist()) == ([1.0, 2.0], [3.0, 4.0], [5.0])
        assert (first.grad, third.grad, swapper.buffers_in_use) == (None, None, 0)
        for held in (first, average, third):
            held.data += 10.0
    assert [held.numel() for held in (first, average, second, third)] == [0, 0, 1, 0]
    added = 10.0 if changes else 0.0
    assert [each.tolist() for each in swapper.files["first"]] == [
        [1 + added, 2 + added],
        [3 + added, 4 + added],
    ]
    assert swapper.files["third"][0].tolist() == [5 + added]


def test_a_failed_block_writes_nothing_to_nvme():
    update, swapper = nvme_update()
    first = update._inner.optimizer.fp32_partitioned_groups_flat[0]

    def fail() -> None:
        first.data += 10.0
        raise RuntimeError("damaged")

    with refused(RuntimeError, "damaged"), update.in_memory(changes=True):
        fail()
    assert swapper.files["first"][0].tolist() == [1.0, 2.0]
    assert first.numel() == 0


def test_states_on_nvme_are_not_read_outside_the_block():
    class DeepSpeedZeroOptimizer_Stage3(SimpleNamespace):  # noqa: N801
        pass

    optimizer = DeepSpeedZeroOptimizer_Stage3(
        fp16_groups=[[]], fp32_partitioned_groups_flat=[torch.zeros(0)], swap_optimizer=True
    )
    with refused(ModelError, "Update.in_memory"):
        list(ZeroUpdate(SimpleNamespace(optimizer=optimizer), min_loss_scale=None).param_shards())


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
    lower = zero_engine(
        delayed_shift=1, dynamic=True, cur_scale=1.0, cur_iter=0, last_overflow_iter=-1, cur_hysteresis=1
    )
    lower.load_state_dict(state | {"cur_hysteresis": 2}, loss_scale=True)
    assert lower.state_dict() == state | {"cur_hysteresis": 1}


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

import random

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from neox_config.spec.update import LossScaling
from neox_model.optim.loss_scale import LossScale

CPU = torch.device("cpu")
NO, YES = torch.tensor(0.0), torch.tensor(1.0)


def dynamic(**changes):
    settings = {"initial": 2.0**10, "is_dynamic": True, "window": 3, "hysteresis": 2} | changes
    return LossScale(LossScaling(**settings), CPU)


@pytest.mark.parametrize("consecutive_hysteresis", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_loss_scale_equals_deepspeed_for_random_overflows(hysteresis, consecutive_hysteresis, monkeypatch):
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)
    ours = dynamic(hysteresis=hysteresis, consecutive_hysteresis=consecutive_hysteresis, minimum=4.0)
    theirs = DynamicLossScaler(
        init_scale=2.0**10,
        scale_window=3,
        min_scale=4.0,
        delayed_shift=hysteresis,
        consecutive_hysteresis=consecutive_hysteresis,
        raise_error_at_min_scale=False,
    )
    generator = random.Random(3)
    seen = set()
    for _ in range(400):
        overflows = generator.random() < 0.3
        ours.update(YES if overflows else NO)
        theirs.update_scale(overflows)
        state = ours.state_dict()
        assert state == {name: getattr(theirs, name) for name in state}
        seen.add(theirs.cur_scale)
    assert len(seen) > 4


def test_a_static_scale_never_changes():
    scale = LossScale(LossScaling(initial=128.0, is_dynamic=False), CPU)
    for _ in range(5):
        scale.update(YES)
    scale.load_state_dict({"cur_scale": 2.0})
    assert float(scale.value) == scale.floor == 128.0


def test_loss_scale_resumes_from_its_saved_state():
    first, second = dynamic(), dynamic()
    for overflow in (NO, YES, YES, NO, NO):
        first.update(overflow)
    second.load_state_dict(first.state_dict())
    for overflow in (NO, NO, YES, YES, NO, NO, NO, NO):
        first.update(overflow)
        second.update(overflow)
        assert first.state_dict() == second.state_dict()
    assert first.floor == 1.0


def test_a_smaller_hysteresis_holds_from_the_first_overflow_after_a_resume():
    stored = dynamic(hysteresis=5).state_dict()
    scale = dynamic(hysteresis=1)
    scale.load_state_dict(stored)
    assert scale.state_dict() == stored | {"cur_hysteresis": 1}
    scale.update(YES)
    assert float(scale.value) == stored["cur_scale"] / 2


def test_a_scale_grows_to_its_maximum():
    scale = LossScale(LossScaling(initial=4.0, is_dynamic=True, window=1, maximum=8.0), CPU)
    for _ in range(6):
        scale.update(NO)
    assert float(scale.value) == 8.0

from dataclasses import replace

import pytest
import torch

from neox_config.facts.learning_rate import WarmupThenDecay
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.optim.muon import Muon
from support import checkpoint_runs
from support.refusals import refused


def rates(style, **changes):
    settings = {"peak": 0.4, "floor": 0.1, "warmup": 0.25, "decay_iterations": 10} | changes
    return WarmupThenDecay(style=style, **settings)


def make_schedule():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return LearningRateSchedule(optimizer, rates("linear"))


def test_schedule_sets_the_first_rate_at_once_and_the_next_after_each_update():
    schedule = make_schedule()
    seen = []
    for _ in range(4):
        seen.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step()
    assert seen == [rates("linear").rate(update) for update in range(4)]


def test_schedule_continues_exactly_from_its_state():
    uninterrupted, resumed = make_schedule(), make_schedule()
    for _ in range(6):
        uninterrupted.step()
    resumed.load_state_dict(uninterrupted.state_dict())
    assert resumed.get_lr() == uninterrupted.get_lr() == [rates("linear").rate(6)]
    uninterrupted.step()
    resumed.step()
    assert resumed.get_lr() == uninterrupted.get_lr()


def test_a_count_on_the_device_gives_the_same_rates_and_state():
    on_host, on_device = make_schedule(), make_schedule()
    on_device.load_state_dict({"applied_updates": 2})
    on_host.load_state_dict({"applied_updates": 2})
    on_device.move_to(torch.device("cpu"))
    for skipped in (False, True, False, False, True, False):
        if not skipped:
            on_host.step()
        on_device.advance(torch.tensor(float(skipped)))
        assert isinstance(on_device.current_rate, torch.Tensor)
        assert on_device.get_lr() == on_host.get_lr()
        assert on_device.state_dict() == on_host.state_dict()
    on_device.load_state_dict({"applied_updates": 1})
    assert on_device.get_lr() == [rates("linear").rate(1)]


def test_rates_on_the_device_are_made_ahead_in_blocks():
    schedule = make_schedule()
    schedule.curve = rates("cosine", decay_iterations=4000)
    schedule.move_to(torch.device("cpu"))
    for _ in range(2500):
        schedule.advance(torch.tensor(0.0))
    assert schedule.get_lr() == [schedule.curve.rate(2500)]


CYCLE = replace(
    checkpoint_runs.CYCLE,
    cycle_min_lr=0.1,
    cycle_max_lr=0.4,
    cycle_first_step_size=3,
    cycle_second_step_size=3,
)


def of_class(kind, **settings):
    return kind([torch.nn.Parameter(torch.zeros(1))], lr=1.0, **settings)


@pytest.mark.parametrize(
    ("optimizer", "name", "expected"),
    [
        (of_class(torch.optim.Adam, betas=(0.6, 0.7)), "betas", lambda momentum: (momentum, 0.7)),
        (of_class(torch.optim.SGD, momentum=0.6), "momentum", lambda momentum: momentum),
        (of_class(torch.optim.RMSprop, momentum=0.6), "momentum", lambda momentum: momentum),
    ],
)
def test_the_momentum_of_the_curve_reaches_the_optimizer(optimizer, name, expected):
    schedule = LearningRateSchedule(optimizer, CYCLE)
    seen = []
    for _ in range(9):
        seen.append(optimizer.param_groups[0][name])
        assert schedule.current_momentum == CYCLE.momentum(schedule.applied_updates)
        schedule.step()
    assert seen == [expected(CYCLE.momentum(update)) for update in range(9)]


def test_a_count_with_a_changing_momentum_stays_on_the_host():
    schedule = LearningRateSchedule(of_class(torch.optim.Adam), CYCLE)
    schedule.move_to(torch.device("cpu"))
    assert not schedule.is_on_device
    schedule.step()
    assert schedule.current_momentum == CYCLE.momentum(1)


def test_the_configured_momentum_comes_back_with_another_curve():
    """A checkpoint's curve replaces the configuration's."""
    schedule = LearningRateSchedule(of_class(torch.optim.Adam, betas=(0.6, 0.7)), CYCLE)
    schedule.move_to(torch.device("cpu"))
    schedule.curve = rates("linear")
    schedule.load_state_dict({"applied_updates": 2})
    assert schedule.optimizer.param_groups[0]["betas"] == (0.6, 0.7)
    assert schedule.current_momentum is None
    assert schedule.is_on_device
    schedule.curve = CYCLE
    schedule.load_state_dict({"applied_updates": 2})
    assert schedule.optimizer.param_groups[0]["betas"] == (CYCLE.momentum(2), 0.7)
    assert not schedule.is_on_device


def test_an_optimizer_without_a_momentum_is_refused():
    optimizer = of_class(torch.optim.Adadelta)
    with refused(ValueError, "OneCycle changes the"):
        LearningRateSchedule(optimizer, CYCLE)
    schedule = LearningRateSchedule(optimizer, replace(CYCLE, cycle_momentum=False))
    assert not schedule.accepts(CYCLE)
    assert "betas" not in optimizer.param_groups[0]
    assert "momentum" not in optimizer.param_groups[0]


def test_the_momentum_of_muon_is_that_of_both_parts_and_comes_back():
    """Its groups have `momentum` and `betas`; matrices use the first, other weights the second."""
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(2, 2))], "is_of_matrices": is_of_matrices}
        for is_of_matrices in (True, False)
    ]
    optimizer = Muon(groups, lr=1.0, momentum=0.6, betas=(0.5, 0.7))
    schedule = LearningRateSchedule(optimizer, CYCLE)
    schedule.step()
    matrices, others = optimizer.param_groups
    momentum = CYCLE.momentum(1)
    assert (matrices["momentum"], matrices["betas"]) == (momentum, (0.5, 0.7))
    assert (others["momentum"], others["betas"]) == (0.6, (momentum, 0.7))
    schedule.curve = rates("linear")
    schedule.load_state_dict({"applied_updates": 2})
    assert (matrices["momentum"], others["betas"]) == (0.6, (0.5, 0.7))


def test_the_second_rate_of_muon_is_relative_to_the_curve_in_effect():
    """The curve of a checkpoint has another largest rate than the configuration's `lr`."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = Muon([{"params": [parameter]}], lr=0.4, adam_lr=0.02)
    schedule = LearningRateSchedule(optimizer, rates("constant"))
    schedule.curve = rates("constant", peak=0.8)
    schedule.load_state_dict({"applied_updates": 5})
    parameter.grad = torch.ones(1)
    optimizer.step()
    # The first step of Adam is the sign of the gradient.
    assert parameter.item() == pytest.approx(-0.02, rel=1e-5)
    schedule.curve = rates("constant", peak=0.0, floor=0.0)
    schedule.load_state_dict({"applied_updates": 5})
    optimizer.step()
    assert parameter.item() == pytest.approx(-0.02, rel=1e-5)

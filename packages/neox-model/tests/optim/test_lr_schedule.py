import torch

from neox_config.facts.learning_rate import WarmupThenDecay
from neox_model.optim.lr_schedule import LearningRateSchedule


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

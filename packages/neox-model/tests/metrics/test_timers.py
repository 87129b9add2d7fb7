import pytest

from neox_model.metrics.timers import Timers


def test_time_outside_and_inside_activities_since_the_last_reading():
    moments = iter([0.0, 2.0, 5.0, 6.0, 10.0, 10.5, 11.0])
    timers = Timers(clock=lambda: next(moments))
    with timers.measure("evaluate"):  # 2 to 5
        pass
    with timers.measure("checkpoint"):  # 6 to 10
        pass
    assert timers.read() == (3.5, {"evaluate": 3.0, "checkpoint": 4.0})
    assert timers.read() == (0.5, {})


def test_an_activity_that_fails_is_counted_too():
    moments = iter([0.0, 1.0, 4.0, 4.0])
    timers = Timers(clock=lambda: next(moments))
    with pytest.raises(OSError, match="full"), timers.measure("checkpoint"):
        raise OSError("full")
    assert timers.read() == (1.0, {"checkpoint": 3.0})

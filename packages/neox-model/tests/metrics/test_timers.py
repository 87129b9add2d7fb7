from neox_model.metrics.timers import Timers, phase_times
from support.refusals import refused


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
    with refused(OSError, "full"), timers.measure("checkpoint"):
        raise OSError("full")
    assert timers.read() == (1.0, {"checkpoint": 3.0})


def test_activities_leave_out_those_inside_them():
    # forward 0 to 2; step 3 to 11, with the reduction 7 to 10 inside it
    clock, waits = iter([0, 0, 2, 3, 7, 10, 11, 30, 31]), []
    timers = Timers(lambda: waits.append(1), clock=lambda: next(clock))
    with timers.measure("forward"):
        pass
    with timers.measure("step"), timers.measure("backward_allreduce"):
        pass
    assert len(waits) == 6
    assert timers.read() == (20, {"forward": 2, "step": 5, "backward_allreduce": 3})
    assert timers.read() == (1, {})


def test_times_of_phases_add_up_to_the_whole():
    measured = {"forward": 2, "step": 5, "backward_allreduce": 3}
    assert phase_times(measured, 30) == {**measured, "backward_inner": 0, "backward": 3, "other": 20}

import time

import pytest
import torch

from neox_model.metrics.compute_time import Clock, ComputeTime, device_clock


class Queue:
    """A device whose moments are numbers, and which has worked up to `done`."""

    def __init__(self, moments):
        self.moments, self.done = iter(moments), float("inf")
        self.clock = Clock(
            now=lambda: next(self.moments),
            is_past=lambda moment: moment <= self.done,
            seconds=lambda begin, end: end - begin,
        )


def compute(measured, *phases):
    for phase in phases:
        with measured.measure(phase):
            pass


def test_counted_phases_are_summed_without_those_inside_them():
    measured = ComputeTime(("forward", "backward_inner"), Queue([0, 2, 10, 13, 20, 24]).clock)
    compute(measured, "data", "forward")  # 0 to 2
    with measured.measure("backward_inner"):  # 10 to 13, 20 to 24
        compute(measured, "backward_allreduce")
    compute(measured, "step", "pipeline")
    measured.end_iteration()
    assert measured.read() == 2 + 3 + 4
    assert measured.read() is None


def test_a_reading_is_the_mean_of_the_iterations_that_computed():
    measured = ComputeTime(("forward",), Queue([0, 100, 200, 201, 300, 305]).clock)
    compute(measured, "forward")
    measured.discard_iteration()
    for count in (1, 0, 1):
        compute(measured, *["forward"] * count)
        measured.end_iteration()
    assert measured.read() == (1 + 5) / 2


def test_an_iteration_counts_when_the_device_has_finished_it():
    queue = Queue([0, 1, 2, 4, 6, 9])
    measured = ComputeTime(("forward",), queue.clock)
    readings = []
    for queue.done in (0, 3, 9):
        compute(measured, "forward")
        measured.end_iteration()
        readings.append(measured.read())
    assert readings == [None, 1, (2 + 3) / 2]


@pytest.mark.gpu
def test_events_measure_the_work_of_a_gpu_and_do_not_wait():
    measured = ComputeTime(("forward",), device_clock())
    with measured.measure("forward"):
        torch.cuda._sleep(500_000_000)
    started = time.perf_counter()
    measured.end_iteration()
    assert measured.read() is None
    assert time.perf_counter() - started < 0.05
    torch.cuda.synchronize()
    measured.end_iteration()
    assert measured.read() > 0.05

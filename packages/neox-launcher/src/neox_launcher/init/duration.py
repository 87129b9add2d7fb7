"""Estimate how long a run takes, before it starts."""

import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

from neox_config.errors import LaunchError
from neox_launcher.init.training import MOST_EVALUATION_SHARE, Devices, Training

__all__ = ["FEWEST_ITERATIONS", "Measure", "cpu_speed", "describe_duration", "parse_duration", "within"]

Measure = Callable[[int, int], float | None]
"""Returns the operations per second of the CPU, as `cpu_speed`."""

# Multiplies matrices several times for a while, after a first time that is not counted, and prints operations
# per second of the fastest time: a plan that a busy moment made too short wastes most of its time.
_MULTIPLY = """\
import sys, time
import numpy
rows, width = int(sys.argv[1]), int(sys.argv[2])
one, other = numpy.ones((rows, width), numpy.float32), numpy.ones((width, 4 * width), numpy.float32)
one @ other
speeds = []
for _ in range(6):
    count, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < 0.2:
        one @ other
        count += 1
    speeds.append(8 * rows * width * width * count / passed)
    time.sleep(0.1)
print(max(speeds))
"""
_TIMEOUT_SECONDS = 60
FEWEST_ITERATIONS = 50
"""With fewer, a model has hardly left its random weights: the warmup alone takes some of them."""
# A run takes this many times as long as its matrix products would alone: models of 1 and 3 million
# parameters on two cores, idle and shared with other programs. The smaller the model, the more other work.
_LEAST_OTHER_WORK, _MOST_OTHER_WORK = 2.0, 5.0
# Names of units, with their seconds and the number of them from which the next one is used.
_UNITS = (("second", 1, 90), ("minute", 60, 90), ("hour", 3600, 48), ("day", 86400, math.inf))
_DURATION = re.compile(r"(\d+\.?\d*)\s*(s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?)")


def cpu_speed(rows: int, width: int) -> float | None:
    """Return the operations per second of this machine's CPU in matrix products; None if not measured.

    Args:
        rows: tokens of a micro-batch.
        width: hidden size.
    """
    command = [sys.executable, "-c", _MULTIPLY, str(rows), str(width)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS)
        return float(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def describe_duration(training: Training, devices: Devices, *, measure: Measure = cpu_speed) -> str:
    """Return how long a run takes, its evaluations included.

    Args:
        training: the run.
        devices: what it runs on.
        measure: measures the CPU, for tests.
    """
    with_evaluations = 1 + training.evaluation_share
    if training.seconds_per_iteration is not None:
        seconds = training.seconds_per_iteration * training.iterations * with_evaluations
        about = f"about {in_words(seconds)} on {devices.count:,} {devices.kind}"
        return f"{about}, at the speed that neox-config suggest assumes"
    speed = _measured(training, measure)
    if not speed:
        return "not known, because the CPU's speed could not be measured"
    least, most = (
        in_words(training.operations / speed * factor * with_evaluations)
        for factor in (_LEAST_OTHER_WORK, _MOST_OTHER_WORK)
    )
    about = f"about {least}" if least == most else f"{least} to {most}"
    return (
        f"{about} on this machine's CPU, at the highest speed measured: {speed / 1e9:,.0f} billion "
        "operations per second in matrix products"
    )


def within(training: Training, seconds: float, *, measure: Measure = cpu_speed) -> Training:
    """Return the run with the iterations that fit into a time by its estimate, but no more than it has.

    Args:
        training: the run.
        seconds: the time.
        measure: measures the CPU.

    Raises:
        LaunchError: the CPU's speed could not be measured.
    """
    iterations = max(1, int(seconds / _longest_iteration(training, measure)))
    if iterations >= training.iterations:
        return training
    operations = training.operations / training.iterations * iterations
    return replace(
        training,
        iterations=iterations,
        operations=operations,
        limit=f"{in_words(seconds)} (--time)",
        planned_seconds=seconds,
    )


def _longest_iteration(training: Training, measure: Measure) -> float:
    """Return the longest time of an iteration by the estimate, with its share of the evaluations.

    Raises:
        LaunchError: the CPU's speed could not be measured.
    """
    seconds = training.seconds_per_iteration
    if seconds is None:
        speed = _measured(training, measure)
        if not speed:
            raise LaunchError(
                "--time requires the CPU's speed, which could not be measured; leave it out", code="no-speed"
            )
        seconds = training.operations / training.iterations / speed * _MOST_OTHER_WORK
    return seconds * (1 + MOST_EVALUATION_SHARE)


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as `20m`, `5 min`, `1.5h` or `2 days`.

    Raises:
        ValueError: the text is not a duration.
    """
    sizes = {name[0]: size for name, size, _ in _UNITS}
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r} is not a time; write it as 90s, 20m, 2h or 1d")
    return float(found[1]) * sizes[found[2][0]]


def _measured(training: Training, measure: Measure) -> float | None:
    return measure(training.setup.run.batch.micro * training.seq_length, training.candidate.width)


def in_words(seconds: float) -> str:
    """Write a duration with one unit, in at most two digits that matter: `40 seconds`, `7 hours`."""
    unit, size, _ = next(each for each in _UNITS if seconds < each[1] * each[2])
    count = max(1, round(seconds / size))
    return f"{count:,} {unit}" if count == 1 else f"{count:,} {unit}s"

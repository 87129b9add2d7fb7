"""Estimate how long a training takes, before it starts."""

import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

from neox_config.errors import LaunchError
from neox_launcher.init.training import MOST_EVALUATION_SHARE, Devices, Training

__all__ = ["Measure", "cpu_speed", "describe_duration", "parse_duration", "within"]

Measure = Callable[[int, int], float | None]
"""Returns the operations per second of the CPU, as `cpu_speed`."""

# Multiplies matrices for half a second, after a first time that is not counted, and prints operations per
# second. The mean, because other programs slow a training down in the same way.
_MULTIPLY = """\
import sys, time
import numpy
rows, width = int(sys.argv[1]), int(sys.argv[2])
one, other = numpy.ones((rows, width), numpy.float32), numpy.ones((width, 4 * width), numpy.float32)
one @ other
count, started = 0, time.perf_counter()
while time.perf_counter() - started < 0.5:
    one @ other
    count += 1
print(8 * rows * width * width * count / (time.perf_counter() - started))
"""
_TIMEOUT_SECONDS = 60
# A training takes this many times as long as its matrix products would alone: models of 1 and 3 million
# parameters on two cores, idle and shared with other programs. The smaller the model, the more other work.
_LEAST_OTHER_WORK, _MOST_OTHER_WORK = 2.0, 5.0
# Names of units, with their seconds and the number of them from which the next one is used.
_UNITS = (("second", 1, 90), ("minute", 60, 90), ("hour", 3600, 48), ("day", 86400, math.inf))


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
    """Return how long a training takes, its evaluations included.

    Args:
        training: the training.
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
        f"{about} on this machine's CPU, at its speed now: {speed / 1e9:,.0f} billion operations per second "
        "in matrix products"
    )


def within(training: Training, seconds: float, *, measure: Measure = cpu_speed) -> Training:
    """Return the training with the iterations that fit into a time by its estimate, but no more than it has.

    Args:
        training: the training.
        seconds: the time.
        measure: measures the CPU.

    Raises:
        LaunchError: the CPU's speed could not be measured.
    """
    per_iteration = training.seconds_per_iteration
    if per_iteration is None:
        speed = _measured(training, measure)
        if not speed:
            raise LaunchError("--time requires the CPU's speed, which could not be measured; leave it out")
        # The longest time of the estimate.
        per_iteration = training.operations / training.iterations / speed * _MOST_OTHER_WORK
    iterations = max(1, int(seconds / (per_iteration * (1 + MOST_EVALUATION_SHARE))))
    if iterations >= training.iterations:
        return training
    operations = training.operations / training.iterations * iterations
    return replace(
        training, iterations=iterations, operations=operations, limit=f"{in_words(seconds)} (--time)"
    )


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as `20m`, `1.5h` or `2d`.

    Raises:
        ValueError: the text is not a duration.
    """
    sizes = {name[0]: size for name, size, _ in _UNITS}
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*([smhd])\s*", text.lower())
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r} is not a time; write it as 90s, 20m, 2h or 1d")
    return float(found[1]) * sizes[found[2]]


def _measured(training: Training, measure: Measure) -> float | None:
    return measure(training.layout.micro_batch * training.seq_length, training.candidate.width)


def in_words(seconds: float) -> str:
    """Write a duration with one unit, in at most two digits that matter: `40 seconds`, `7 hours`."""
    unit, size, _ = next(each for each in _UNITS if seconds < each[1] * each[2])
    count = max(1, round(seconds / size))
    return f"{count:,} {unit}" if count == 1 else f"{count:,} {unit}s"

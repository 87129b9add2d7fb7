"""Estimate how long a training takes, before it starts."""

import math
import subprocess
import sys
from collections.abc import Callable

from neox_launcher.init.sizes import SIZES
from neox_launcher.init.training import Devices, Training

__all__ = ["describe_duration"]

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


def describe_duration(
    training: Training, devices: Devices, *, measure: Callable[[int, int], float | None] = cpu_speed
) -> list[str]:
    """Return lines about the time that a training takes, and what makes it shorter.

    Args:
        training: the training.
        devices: what it runs on.
        measure: measures the CPU, for tests.
    """
    shorter = _how_to_shorten(training.candidate.name)
    if training.seconds_per_iteration is not None:
        seconds = training.seconds_per_iteration * training.iterations
        about = f"about {in_words(seconds)} on {devices.count:,} {devices.kind}"
        return [f"estimated time: {about}, at the speed that neox-config suggest assumes; {shorter}"]
    speed = measure(training.layout.micro_batch * training.seq_length, training.candidate.width)
    if not speed:
        return [f"estimated time: not known, because the CPU's speed could not be measured; {shorter}"]
    least, most = (
        in_words(training.operations / speed * factor) for factor in (_LEAST_OTHER_WORK, _MOST_OTHER_WORK)
    )
    about = f"about {least}" if least == most else f"{least} to {most}"
    return [
        f"estimated time: {about} on this machine's CPU, at its speed now: {speed / 1e9:,.0f} billion "
        f"operations per second in matrix products; {shorter}"
    ]


def _how_to_shorten(model: str) -> str:
    """Return what makes a training shorter; the smallest model cannot be replaced by a smaller one."""
    how = "for a shorter training, add --set train-iters=200 to the command"
    if model == next(iter(SIZES)):
        return how
    return f"{how}, or use a smaller {'--size' if model in SIZES else '--model'}"


def in_words(seconds: float) -> str:
    """Write a duration with one unit, in at most two digits that matter: `40 seconds`, `7 hours`."""
    unit, size, _ = next(each for each in _UNITS if seconds < each[1] * each[2])
    count = max(1, round(seconds / size))
    return f"{count:,} {unit}" if count == 1 else f"{count:,} {unit}s"

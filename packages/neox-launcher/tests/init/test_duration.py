"""What `neox-launch init` prints about the time of a training."""

from types import SimpleNamespace

import pytest

from neox_launcher.init import duration
from neox_launcher.init.duration import cpu_speed, describe_duration, in_words
from neox_launcher.init.training import Devices

CPU = Devices(count=1, memory=2**34, are_gpus=False)
GPUS = Devices(count=8, memory=2**36, are_gpus=True)
SHORTER = "for a shorter training, add --set train-iters=200 to the command, or use a smaller --size"


def training(**changes):
    return SimpleNamespace(
        **{
            "layout": SimpleNamespace(micro_batch=4),
            "seq_length": 256,
            "candidate": SimpleNamespace(name="3m", width=128),
            "operations": 6e13,
            "iterations": 720,
            "seconds_per_iteration": None,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.1, "1 second"),
        (89, "89 seconds"),
        (91, "2 minutes"),
        (89 * 60, "89 minutes"),
        (3 * 3600, "3 hours"),
        (47 * 3600, "47 hours"),
        (10 * 86400, "10 days"),
    ],
)
def test_a_duration_has_one_unit(seconds, words):
    assert in_words(seconds) == words


def test_the_time_on_a_cpu_is_a_range_from_its_measured_speed():
    sizes = []

    def measure(rows, width):
        sizes.append((rows, width))
        return 5e10

    (line,) = describe_duration(training(), CPU, measure=measure)
    assert sizes == [(1024, 128)]
    # 1,200 seconds of products, times 2 and 5.
    time = "estimated time: 40 minutes to 2 hours on this machine's CPU"
    speed = "at its speed now: 50 billion operations per second in matrix products"
    assert line == f"{time}, {speed}; {SHORTER}"


def test_the_time_on_gpus_is_that_of_the_estimate():
    (line,) = describe_duration(training(seconds_per_iteration=10.0), GPUS)
    assert line == (
        "estimated time: about 2 hours on 8 GPUs, at the speed that neox-config suggest assumes; " + SHORTER
    )


def test_a_cpu_that_cannot_be_measured_gives_no_time(monkeypatch):
    monkeypatch.setattr(duration, "_MULTIPLY", "raise SystemExit(1)")
    assert cpu_speed(8, 8) is None
    (line,) = describe_duration(training(), CPU)
    assert line.startswith("estimated time: not known, because the CPU's speed could not be measured; for a")


def test_a_speed_is_printed_by_the_program(monkeypatch):
    monkeypatch.setattr(duration, "_MULTIPLY", "import sys; print(float(sys.argv[1]) * float(sys.argv[2]))")
    assert cpu_speed(1024, 128) == 131072.0


@pytest.mark.parametrize(
    ("model", "end"),
    [("1m", "to the command"), ("10m", "a smaller --size"), ("pythia-160m", "a smaller --model")],
)
def test_a_smaller_model_is_suggested_where_there_is_one(model, end):
    candidate = SimpleNamespace(name=model, width=128)
    (line,) = describe_duration(training(candidate=candidate), CPU, measure=lambda rows, width: 5e10)
    assert line.endswith(end)

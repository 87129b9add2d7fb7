"""What `neox-launch init` prints about the time of a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from neox_config.errors import LaunchError
from neox_launcher.init import duration
from neox_launcher.init.duration import (
    cpu_speed,
    describe_duration,
    in_words,
    parse_duration,
    within,
)
from neox_launcher.init.sizes import SIZES, of_size
from neox_launcher.init.texts import Prepared
from neox_launcher.init.training import Devices, choose_training
from support.refusals import refused, shows
from support.setups import make

CPU = Devices(count=1, memory=2**34, are_gpus=False)
GPUS = Devices(count=8, memory=2**36, are_gpus=True)
PATH = Path("run/config.yml")

TEXTS = Prepared(
    data_path="corpus",
    split="95,5,0",
    vocab_file="tokenizer.json",
    tokenizer_type="HFTokenizer",
    entries=8192,
    training_tokens=10**9,
    validation_tokens=10**6,
)


def training(**changes):
    return SimpleNamespace(
        **{
            "setup": make(train_micro_batch_size_per_gpu=4),
            "seq_length": 256,
            "candidate": SimpleNamespace(name="3m", width=128),
            "operations": 6e13,
            "iterations": 720,
            "seconds_per_iteration": None,
            "evaluation_share": 0.25,
            **changes,
        }
    )


def chosen(devices=CPU, **options):
    return choose_training([of_size(name) for name in SIZES], TEXTS, devices, **options)


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

    line = describe_duration(training(), CPU, measure=measure)
    assert sizes == [(1024, 128)]
    # 1,200 seconds of products and 300 in evaluations, times 2 and 5.
    time = "50 minutes to 2 hours on this machine's CPU"
    speed = "at the highest speed measured: 50 billion operations per second in matrix products"
    assert line == f"{time}, {speed}"


def test_the_time_on_gpus_is_that_of_the_estimate():
    line = describe_duration(training(seconds_per_iteration=12.5), GPUS)
    assert shows(line, "3 hours", "8 GPUs", "neox-config")


def test_a_cpu_that_cannot_be_measured_gives_no_time(monkeypatch):
    monkeypatch.setattr(duration, "_MULTIPLY", "raise SystemExit(1)")
    assert cpu_speed(8, 8) is None
    line = describe_duration(training(), CPU)
    assert shows(line, "not known", "CPU's speed")
    with refused(LaunchError, "--time", code="no-speed"):
        within(chosen(), 60.0)


def test_a_speed_is_printed_by_the_program(monkeypatch):
    monkeypatch.setattr(duration, "_MULTIPLY", "import sys; print(float(sys.argv[1]) * float(sys.argv[2]))")
    assert cpu_speed(1024, 128) == 131072.0


def test_the_speed_is_that_of_the_fastest_moment(monkeypatch):
    pytest.importorskip("numpy")
    # A clock by which the machine is busy: only in the fourth of six times it multiplies as fast as it can.
    busy = """
import itertools, types
import numpy
calls = iter([0.0, 1.0] + [0.0, 1.0] + [0.0, 1.0] + [0.0, 0.1, 0.15, 0.2] + [0.0, 1.0] + [0.0, 1.0])
sys.modules["time"] = types.SimpleNamespace(perf_counter=lambda: next(calls), sleep=lambda seconds: None)
import time
"""
    first, rest = duration._MULTIPLY.split("\n", 1)
    monkeypatch.setattr(duration, "_MULTIPLY", "import sys\n" + busy + rest)
    # Three products in a fifth of a second, of 8 * rows * width * width operations each.
    assert (first, cpu_speed(8, 4)) == ("import sys, time", pytest.approx(2 * 8 * 8 * 16 / 0.2))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("20m", 1200),
        (" 1.5 H ", 5400),
        ("2d", 2 * 86400),
        ("5min", 300),
        ("2 Hours", 7200),
        ("90 seconds", 90),
    ],
)
def test_a_duration_has_a_number_and_a_unit(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["20", "m", "-1m", "0m", "1h30m", "2 weeks", ""])
def test_another_duration_is_refused_with_examples(text):
    with refused(ValueError, "90s, 20m, 2h", "1d"):
        parse_duration(text)


def test_a_time_limits_the_iterations_to_the_longest_time_of_the_estimate():
    def measure(rows, width):
        return 1e11

    whole = chosen()
    short = within(whole, 3600.0, measure=measure)
    per_iteration = whole.operations / whole.iterations / 1e11 * 5
    assert short.iterations == int(3600 / (per_iteration * 1.1)) < whole.iterations
    assert short.operations == pytest.approx(whole.operations * short.iterations / whole.iterations)
    assert short.limit == "60 minutes (--time)"
    assert (whole.planned_seconds, short.planned_seconds) == (None, 3600.0)
    assert describe_duration(short, CPU, measure=measure).startswith("23 minutes to 56 minutes on this")
    # A time that is sufficient changes nothing, and no time leaves nothing to train.
    assert within(whole, 10**9, measure=measure) is whole
    assert within(whole, 0.001, measure=measure).iterations == 1


def test_a_time_chooses_the_size_too():
    def within_an_hour(training):
        return within(training, 3600.0, measure=lambda rows, width: 1e11)

    whole, short = chosen(), chosen(shorten=within_an_hour)
    assert (whole.candidate.name, short.candidate.name) == ("3m", "1m")
    assert short.tokens >= short.parameters
    gpus = chosen(GPUS, shorten=lambda training: within(training, 60.0))
    assert gpus.seconds_per_iteration * gpus.iterations <= 60.0
    assert gpus.parameters < chosen(GPUS).parameters

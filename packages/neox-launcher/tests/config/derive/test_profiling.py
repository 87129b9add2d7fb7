"""Profiled iterations: with memory-profiling alone, a late start is lowered."""

import pytest

from neox_config.derive.profiling import profiled_iterations

MEMORY = "memory-profiling: true\nlog-dir: logs\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MEMORY + "profile: true\nprofile-step-start: 0\nprofile-step-stop: 4", range(1, 5)),
        (MEMORY + "profile-step-start: 3\nprofile-step-stop: 4", range(3, 5)),
        (MEMORY + "profile-step-stop: 4", range(4, 5)),
        (MEMORY + "profile-step-start: 20", range(10, 13)),
    ],
)
def test_the_range_of_iterations(load, text, expected):
    config = load(text)
    assert profiled_iterations(config.logging, config.training.train_iters) == expected

"""The next good width."""

import pytest

from neox_config.facts.widths import next_aligned


@pytest.mark.parametrize(
    ("width", "ranks", "expected"),
    [
        (5461, 1, 5504),  # 86 x 64
        (5461, 2, 5504),  # 43 x 128
        (5461, 4, 5632),  # 22 x 256
        (5504, 1, 5504),
        (170, 1, 176),  # 192 and a multiple of 32 would add more than a twentieth
        (4, 1, 8),
        (100, 8, 128),
    ],
)
def test_the_part_of_each_rank_is_a_multiple_of_64_or_of_8_if_that_adds_much(width, ranks, expected):
    assert next_aligned(width, ranks=ranks) == expected

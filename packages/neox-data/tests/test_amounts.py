"""Amounts of data as text."""

import pytest

from neox_data.amounts import bytes_in_words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1_000, "1.0 kB"),
        (42_345, "42.3 kB"),
        (1_000_000, "1.0 MB"),
        (2_345_600_000, "2,345.6 MB"),
    ],
)
def test_the_unit_fits_the_size(num_bytes: int, words: str) -> None:
    assert bytes_in_words(num_bytes) == words

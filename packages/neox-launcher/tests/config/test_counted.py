"""Numbers with their nouns."""

import pytest

from neox_config.counted import counted, first_few


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 documents"), (1, "1 document"), (2, "2 documents"), (1234, "1,234 documents")]
)
def test_one_has_no_s(number, text):
    assert counted(number, "document") == text


def test_another_plural_is_given():
    assert counted(1, "batch was read", "batches were read") == "1 batch was read"
    assert counted(3, "batch was read", "batches were read") == "3 batches were read"


@pytest.mark.parametrize(
    ("names", "most", "number", "expected"),
    [
        ("abc", 3, None, "a, b, c"),
        ("abcd", 3, None, "a, b, c and 1 more"),
        ("ab", 3, 1002, "a, b and 1,000 more"),
        ("", 3, None, ""),
    ],
)
def test_a_long_list_ends_with_the_number_of_the_others(names, most, number, expected):
    assert first_few(list(names), most, number=number) == expected

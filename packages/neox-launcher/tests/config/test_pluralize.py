"""Numbers with their nouns."""

import pytest

from neox_config.pluralize import first_few, pluralize


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 documents"), (1, "1 document"), (2, "2 documents"), (1234, "1,234 documents")]
)
def test_one_has_no_s(number, text):
    assert pluralize(number, "document") == text


def test_another_plural_is_given():
    assert pluralize(1, "batch was read", "batches were read") == "1 batch was read"
    assert pluralize(3, "batch was read", "batches were read") == "3 batches were read"


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

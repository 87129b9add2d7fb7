"""Numbers with their nouns."""

import pytest

from neox_config.counted import counted


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 documents"), (1, "1 document"), (2, "2 documents"), (1234, "1,234 documents")]
)
def test_one_has_no_s(number, text):
    assert counted(number, "document") == text


def test_another_plural_is_given():
    assert counted(1, "batch was read", "batches were read") == "1 batch was read"
    assert counted(3, "batch was read", "batches were read") == "3 batches were read"

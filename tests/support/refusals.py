"""Assertions about what a message says, without its wording: its code and the values in it, in order."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# As long as a long sentence.
FAR = 300


def shows(text: object, *values: object, far: int = FAR) -> bool:
    """Return whether a text contains all values, in this order and at most so many characters apart."""
    found = f".{{0,{far}}}?".join(re.escape(str(value)) for value in values)
    return re.search(found, str(text), re.DOTALL) is not None


@contextmanager
def refused(
    kind: type[BaseException], *values: object, code: str = ""
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Require an error with these values in its message, in this order, and with a code, if one is given."""
    with pytest.raises(kind) as caught:
        yield caught
    assert shows(caught.value, *values, far=10_000), (values, str(caught.value))
    assert not code or caught.value.code == code

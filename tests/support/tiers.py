"""Which cases of a parametrized test run in `make test`; the others run in `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["slow_except"]


def slow_except(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Mark values of a parameter as slow, except these; a tuple is a value for each of several parameters."""
    values = list(values)
    missing = [value for value in fast if value not in values]
    if missing:
        raise ValueError(f"{missing} are not among the values")
    return [value if value in fast else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)

"""Compare what a contract finds with what it expects, also where Python leaves assertions out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["ContractError", "expect", "expect_error"]


class ContractError(Exception):
    """Raised if another package does something else than we expect."""


def expect(found: Any, expected: Any, what: str = "it") -> None:
    """Raise an error if a value is another one.

    Raises:
        ContractError: they differ.
    """
    if found != expected:
        raise ContractError(f"{what} is {found!r} instead of {expected!r}")


@contextmanager
def expect_error(kind: type[Exception], message: str = "") -> Iterator[None]:
    """Raise an error if the block does not raise one of this kind with this message.

    Raises:
        ContractError: it does not.
    """
    try:
        yield
    except kind as error:
        expect(message in str(error), True, f"{message!r} in {str(error)!r}")
    else:
        raise ContractError(f"no {kind.__name__} is raised")

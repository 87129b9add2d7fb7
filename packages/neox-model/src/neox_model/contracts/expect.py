"""Compare what a contract finds with what it expects, also where Python leaves assertions out."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

__all__ = ["ContractError", "expect", "expect_error", "expect_in_source", "noting"]


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


def expect_in_source(owner: Any, text: str) -> None:
    """Raise an error if the source of a class, function or module does not contain a text.

    Raises:
        ContractError: it does not.
    """
    expect(text in inspect.getsource(owner), True, f"{text!r} in the source of {owner.__name__}")


def noting(phases: list[str]) -> Callable[[str], AbstractContextManager[None]]:
    """Return a context of each phase that adds the name of the phase to a list."""

    def measure(phase: str) -> AbstractContextManager[None]:
        phases.append(phase)
        return nullcontext()

    return measure

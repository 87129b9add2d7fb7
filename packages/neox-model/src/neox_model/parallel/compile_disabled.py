"""Functions that torch.compile must not compile: those that communicate or use separate random streams."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CompileDisabled"]


class CompileDisabled:
    """A function that is excluded from compiled graphs after `disable_compile` was called.

    It is not excluded from the start, because the import that torch requires for this takes a second.

    Args:
        function: the function to call.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self._function(*arguments)

    def disable_compile(self) -> None:
        """Exclude the function from compiled graphs."""
        self._function = torch.compiler.disable(self._function)

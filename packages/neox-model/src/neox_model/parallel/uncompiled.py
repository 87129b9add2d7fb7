"""What torch.compile must leave as it is: functions that communicate, and those with streams of their own."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Uncompiled"]


class Uncompiled:
    """Calls a function; once `keep_out_of_graphs` was said, torch.compile compiles only what is around it.

    Not so from the start, because torch takes a second to import what it needs for saying so.

    Args:
        function: what is called.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        """What the function gives."""
        return self._function(*arguments)

    def keep_out_of_graphs(self) -> None:
        """From now on no graph holds it."""
        self._function = torch.compiler.disable(self._function)

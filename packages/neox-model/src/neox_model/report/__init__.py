"""The command `neox-report`: a page about one or several runs, and a plot of the loss, from their records.

The command is loaded on first use, after `neox_model.report.__main__` has prepared for Ctrl-C.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neox_model.report.cli import main

__all__ = ["main"]


def __getattr__(name: str) -> Any:
    if name != "main":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("neox_model.report.cli").main

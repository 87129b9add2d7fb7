"""torch's optimizers without torch's compiler, whose import takes a second of every start.

Their methods import torch._dynamo, only to tell it to leave them alone. No optimizer is compiled here, so
they are called as torch wrote them. Where torch wraps them in another way, all is as torch has it.
"""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

import torch
from torch.optim import Optimizer

__all__ = ["without_compiler"]

Kind = TypeVar("Kind", bound=Optimizer)


def without_compiler(kind: type[Kind]) -> type[Kind]:
    """The same optimizer, whose methods do not import torch._dynamo; `differentiable` is not for it."""
    _mark_methods()
    bare_step = inspect.unwrap(kind.step)

    @torch.no_grad()
    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
        return bare_step(self, closure)

    return type(kind.__name__, (kind,), {"step": step, "__doc__": kind.__doc__})


def _mark_methods() -> None:
    """Mark what all optimizers share as torch does at the first call: with the function to call instead."""
    for method in vars(Optimizer).values():
        if isinstance(method, FunctionType) and method.__code__.co_filename.endswith("_compile.py"):
            bare = inspect.unwrap(method)
            vars(bare).setdefault("__dynamo_disable", bare)

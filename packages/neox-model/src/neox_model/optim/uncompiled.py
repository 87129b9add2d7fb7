"""torch's optimizers without torch's compiler, whose import takes a second of every start.

Their methods import torch._dynamo, only to tell it to leave them alone. No optimizer is compiled here, so
they are called as torch wrote them. Where torch wraps them in another way, all is as torch has it.
"""

import inspect
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

__all__ = ["without_compiler"]

Kind = TypeVar("Kind", bound=Optimizer)


def without_compiler(kind: type[Kind], *arguments: Any, **settings: Any) -> Kind:
    """An optimizer of this kind whose methods do not import torch._dynamo; `differentiable` is not for it."""
    _mark_methods()
    optimizer = kind(*arguments, **settings)
    step = Optimizer.profile_hook_step(torch.no_grad()(inspect.unwrap(kind.step)))
    # DeepSpeed asks for the very class, so that it has to be this one's alone.
    vars(optimizer)["step"] = MethodType(step, optimizer)
    return optimizer


def _mark_methods() -> None:
    """Mark what all optimizers share as torch does at the first call: with the function to call instead."""
    for method in vars(Optimizer).values():
        if isinstance(method, FunctionType) and method.__code__.co_filename.endswith("_compile.py"):
            bare = inspect.unwrap(method)
            vars(bare).setdefault("__dynamo_disable", bare)

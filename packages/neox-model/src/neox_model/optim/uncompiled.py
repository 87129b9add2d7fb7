"""Use torch's optimizers without importing torch's compiler, which takes a second at every start.

Their methods import torch._dynamo only to exclude themselves from compilation. No optimizer is compiled here,
so the unwrapped methods are called. If torch wraps them in another way, they are used unchanged.
"""

import inspect
from types import MethodType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from neox_model.torch_compat import mark_optimizer_methods

__all__ = ["without_compiler"]

Kind = TypeVar("Kind", bound=Optimizer)


def without_compiler(kind: type[Kind], *arguments: Any, **settings: Any) -> Kind:
    """Build an optimizer whose methods do not import torch._dynamo; `differentiable` is not supported."""
    mark_optimizer_methods()
    optimizer = kind(*arguments, **settings)
    step = Optimizer.profile_hook_step(torch.no_grad()(inspect.unwrap(kind.step)))
    # Set it on the instance, because DeepSpeed compares the class.
    vars(optimizer)["step"] = MethodType(step, optimizer)
    return optimizer

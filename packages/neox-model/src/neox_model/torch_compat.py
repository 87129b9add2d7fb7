"""Everything that uses torch beyond its documented interface, tried with torch 2.13.

It is not in `deepspeed_compat.py`, because optimizers and layers are used without DeepSpeed, whose import
takes seconds. A test holds that no other module uses such names.
"""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch.optim import Optimizer

__all__ = [
    "dump_memory_snapshot",
    "flight_recorder_entries",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "limit_graphs",
    "mark_optimizer_methods",
    "on_out_of_memory",
    "recompile_limit_error",
    "record_memory_history",
    "skip_on_device",
    "stop_memory_history",
]

# One kernel for a list of tensors, as torch's own optimizers use; there are no documented names.
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

# A build of PyTorch has some of these, depending on its communication libraries.
_FLIGHT_RECORDER_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def flight_recorder_entries() -> list[dict[str, Any]]:
    """Return the collectives in the flight recorder, which has no documented interface in the process."""
    entries: list[dict[str, Any]] = []
    for name in _FLIGHT_RECORDER_DUMPS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries", [])
    return entries


def skip_on_device(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Let the next step of a fused Adam or AdamW change nothing if `found_inf` is 1.

    torch's GradScaler passes it in the same way, together with a scale that must not be used here.
    """
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]


def mark_optimizer_methods() -> None:
    """Mark methods of Optimizer as torch does at the first call, with the function to call instead.

    Otherwise the first call imports torch's compiler, only to exclude the method from compilation. Methods
    that torch wraps in another way stay as they are.
    """
    for method in vars(Optimizer).values():
        if isinstance(method, FunctionType) and method.__code__.co_filename.endswith("_compile.py"):
            bare = inspect.unwrap(method)
            vars(bare).setdefault("__dynamo_disable", bare)


def limit_graphs(count: int) -> None:
    """Let torch.compile make at most `count` graphs of a function, and raise an error at the next one.

    By default it continues without compilation, silently.
    """
    torch._dynamo.config.recompile_limit = count
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def recompile_limit_error() -> type[Exception]:
    """Return the class of the error at the limit; imported here, because the compiler's import is slow."""
    return torch._dynamo.exc.FailOnRecompileLimitHit


# Memory snapshots of GPUs: their guide names these functions, but none is public.


def record_memory_history(events: int) -> None:
    """Record allocations on GPUs with the Python code that made them; keep the last `events`."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=events)


def stop_memory_history() -> None:
    """Stop recording allocations, and delete what was recorded."""
    torch.cuda.memory._record_memory_history(enabled=None)


def dump_memory_snapshot(path: Path) -> None:
    """Write what is allocated on this process's GPU, and the recorded history."""
    torch.cuda.memory._dump_snapshot(str(path))


def on_out_of_memory(call: Callable[[], None]) -> None:
    """Call the function when a GPU's memory runs out, before the error is raised; it cannot be removed."""
    attach = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
    attach(lambda device, size, total, free: call())

"""The milliseconds that a GPU spends on each class of kernel, from a trace of torch.profiler."""

import gzip
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

__all__ = ["CLASSES", "Kernel", "by_class", "profiled"]

# Class -> pattern of the names of its kernels, in any case; the first that is found in a name is its class.
# Names of compiled kernels list the operators beside them, such as attention, so they come first.
CLASSES: Mapping[str, str] = {
    "compiled": r"^triton_(?!tem_)",
    "attention": "cudnn|flash|fmha|flex_attention",
    "loss": "cross_entropy|nll_loss|softmax",
    "fused operators": r"\bneox::",
    "update": "multi_tensor|adam|foreach",
    "products": "gemm|cutlass|nvjet|cublas|^triton_tem_",
    "copies": "^memcpy|^memset",
}
_OTHER, _IDLE = "other", "idle"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")

# Name, and the microseconds at which it starts and ends.
Kernel = tuple[str, float, float]


def by_class(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Return the milliseconds of each class, and those between the first and the last kernel without any.

    Kernels that run at once are counted once each.
    """
    milliseconds = dict.fromkeys((*CLASSES, _OTHER, _IDLE), 0.0)
    reached: float | None = None
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        milliseconds[_class_of(name)] += (end - start) / 1e3
        if reached is not None:
            milliseconds[_IDLE] += max(0.0, start - reached) / 1e3
        reached = end if reached is None else max(reached, end)
    return milliseconds


def _class_of(name: str) -> str:
    return next((known for known, names in CLASSES.items() if re.search(names, name, re.IGNORECASE)), _OTHER)


def profiled(work: Callable[[], object], trace: Path) -> dict[str, float]:
    """Profile work and return the milliseconds by class, all 0 without a GPU.

    On a GPU, the host's operators are not recorded, because that would slow the host.

    Args:
        work: what is profiled; it returns when the GPU has finished.
        trace: file of the Chrome trace, which ends in .json.gz.
    """
    on_gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as found:
        work()
    trace.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(trace))
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return by_class(
        (event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in _ON_GPU
    )

"""Measure the memory of this process."""

import resource
import sys
from pathlib import Path

import torch

__all__ = ["memory_metrics", "peak_bytes"]

_STATUS = Path("/proc/self/statm")


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the memory of this process in bytes, as metrics `memory/NAME`.

    On a GPU: allocated by tensors now, the most since the last call, and reserved by torch. Always: resident
    in host memory now and at most.
    """
    found = _host()
    if device.type == "cuda":
        found["memory/allocated_bytes"] = torch.cuda.memory_allocated(device)
        found["memory/peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        found["memory/reserved_bytes"] = torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
    return found


def peak_bytes(device: torch.device) -> float:
    """Return the most memory that this process has used: on a GPU allocated by tensors, else of the host."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return _host()["memory/host_peak_bytes"]


def _host() -> dict[str, float]:
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    if not _STATUS.exists():
        return {"memory/host_peak_bytes": peak}
    now = float(int(_STATUS.read_text().split()[1]) * resource.getpagesize())
    # The kernel updates the peak now and then.
    return {"memory/host_bytes": now, "memory/host_peak_bytes": max(peak, now)}

"""The memory of this host, as far as its processes may use it."""

import os
from pathlib import Path

__all__ = ["usable_memory"]

_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def usable_memory() -> int:
    """Return the bytes of memory of this host, or the limit of its control groups if that is smaller.

    Containers and schedulers set the limits of control groups. Memory that other processes use is counted.
    """
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([whole, *_limits()])


def _limits() -> list[int]:
    """Return the limits of this process's group and of all groups around it, in version 1 or 2."""
    limits = []
    for line in _lines(_MEMBERSHIP):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = _CGROUPS / controllers
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            # "max" is no limit.
            limits += [int(text) for text in _lines(folder / name) if text.isdecimal()]
            if folder == top:
                break
    return limits


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        # A container may show neither its group nor the folders of groups around it.
        return []

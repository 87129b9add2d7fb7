"""The versions of other packages that ours were tested with: the bounds in their pyproject.toml."""

import operator
import re
from importlib.metadata import PackageNotFoundError, requires, version

__all__ = ["installed_version", "tested_versions", "untested_versions"]

# Later ones have narrower bounds.
_OURS = ("neox-launcher", "neox-data", "neox-kernels", "neox-model")
_COMPARISONS = {">=": operator.ge, "<": operator.lt}


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def tested_versions() -> dict[str, str]:
    """Return package -> bounds, such as `>=2.13,<2.16`, where an upper one exists.

    An upper bound means that we use more of the package than its documented interface.
    """
    found = {}
    for ours in _OURS:
        for line in (requires(ours) or ()) if installed_version(ours) else ():
            # What follows a semicolon says when it is required.
            ((name, bounds),) = re.findall(r"^([\w.-]+)([^;]*)", line)
            parts = re.findall(r"(?:>=|<)[\d.]+", bounds)
            if any(part.startswith("<") for part in parts):
                found[name] = ",".join(sorted(parts, reverse=True))
    return found


def untested_versions() -> str:
    """Return the installed packages outside their bounds, with both versions; empty if there is none."""
    found = [(name, installed_version(name), bounds) for name, bounds in tested_versions().items()]
    return ", ".join(
        f"{name} {installed} (tested: {bounds})"
        for name, installed, bounds in found
        if installed is not None and not _lies_within(installed, bounds)
    )


def _lies_within(installed: str, bounds: str) -> bool:
    parts = re.findall(r"(>=|<)([\d.]+)", bounds)
    return all(_COMPARISONS[sign](_release(installed), _release(bound)) for sign, bound in parts)


def _release(text: str) -> list[int]:
    """Return the numbers of a version, without what follows them (`+cu130`, `rc1`) and zeros at the end."""
    numbers = [int(number) for number in re.split(r"[^\d.]", text)[0].split(".") if number]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers

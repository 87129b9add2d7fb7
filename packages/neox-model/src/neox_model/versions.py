"""Versions of Python and of the packages that a training uses."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

__all__ = ["package_versions"]

_PACKAGES = (
    *("neox-model", "neox-launcher", "neox-data", "neox-kernels"),
    *("torch", "deepspeed", "numpy"),
)


def package_versions() -> dict[str, str]:
    """Return the versions of Python, the packages, and the CUDA that torch was built with, if any."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found

"""Versions of Python and of the packages that a run uses."""

import platform

import torch

from neox_model.bounds import installed_version, untested_versions
from neox_model.torch_compat import runtime_cudnn

__all__ = ["package_versions", "version_of_cudnn"]

_PACKAGES = (
    *("neox-model", "neox-launcher", "neox-data", "neox-kernels"),
    *("torch", "deepspeed", "numpy"),
)


def package_versions() -> dict[str, str]:
    """Return the versions of Python, the packages, the CUDA and cuDNN of torch if any, and untested ones."""
    found = {"python": platform.python_version()}
    found |= {package: installed_version(package) or "not installed" for package in _PACKAGES}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    cudnn = runtime_cudnn()
    if cudnn is not None:
        found["cudnn"] = version_of_cudnn(cudnn)
    untested = untested_versions()
    if untested:
        found["untested"] = untested
    return found


def version_of_cudnn(number: int) -> str:
    """Return a version of cuDNN as text: 91900 is 9.19.0."""
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"

"""What pyproject.toml cannot say: with NEOX_KERNELS_PREBUILD=1 the wheel carries the compiled operators.

NEOX_KERNELS_ARCHITECTURES names what they are compiled for, separated by spaces. Without
NEOX_KERNELS_PREBUILD the wheel is plain Python, needs no compiler, and the operators are compiled on first
use.
"""

import os
import sys
import types
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

PREBUILD = os.environ.get("NEOX_KERNELS_PREBUILD") == "1"
ARCHITECTURES = os.environ.get("NEOX_KERNELS_ARCHITECTURES", "sm_80 sm_90 sm_100").split()


class BuildWithOperators(build_py):
    """Copies the Python files, then compiles the operators beside them."""

    def run(self) -> None:
        """Copy, then compile."""
        super().run()
        # The builder alone, without the package's __init__: that one needs torch.
        package = types.ModuleType("neox_kernels")
        package.__path__ = [str(Path(__file__).parent / "src" / "neox_kernels")]
        sys.modules["neox_kernels"] = package
        from neox_kernels.build import build_into
        from neox_kernels.toolchain import find_toolchain

        folder = Path(self.build_lib) / "neox_kernels" / "prebuilt"
        folder.mkdir(parents=True, exist_ok=True)
        build_into(folder, ARCHITECTURES, find_toolchain())


class BinaryDistribution(Distribution):
    """Makes the wheel one of this platform and Python."""

    def has_ext_modules(self) -> bool:
        """Yes: the compiled operators."""
        return True


if PREBUILD:
    setup(
        setup_requires=["ninja>=1.11", "pybind11>=2.13"],
        cmdclass={"build_py": BuildWithOperators},
        distclass=BinaryDistribution,
    )
else:
    setup()

"""With NEOX_KERNELS_PREBUILD=1, add compiled operators to the wheel.

NEOX_KERNELS_ARCHITECTURES lists their architectures, separated by spaces. Without NEOX_KERNELS_PREBUILD the
wheel is pure Python, requires no compiler, and the operators are compiled on first use.
"""

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

PREBUILD = os.environ.get("NEOX_KERNELS_PREBUILD") == "1"
ARCHITECTURES = os.environ.get("NEOX_KERNELS_ARCHITECTURES", "sm_80 sm_90 sm_100").split()


class BuildWithOperators(build_py):
    """Copy the Python files, then compile the operators into the wheel."""

    def run(self) -> None:
        """Copy, then compile."""
        super().run()
        # These modules require no torch.
        sys.path.insert(0, str(Path(__file__).parent / "src"))
        from neox_kernels.build import build_into
        from neox_kernels.toolchain import find_toolchain

        folder = Path(self.build_lib) / "neox_kernels" / "prebuilt"
        folder.mkdir(parents=True, exist_ok=True)
        build_into(folder, ARCHITECTURES, find_toolchain())


class BinaryDistribution(Distribution):
    """Distribution whose wheel is specific to the platform and Python version."""

    def has_ext_modules(self) -> bool:
        """Return True: the wheel contains compiled operators."""
        return True


if PREBUILD:
    setup(
        setup_requires=["filelock>=3.30", "ninja>=1.11", "pybind11>=2.13"],
        cmdclass={"build_py": BuildWithOperators},
        distclass=BinaryDistribution,
    )
else:
    setup()

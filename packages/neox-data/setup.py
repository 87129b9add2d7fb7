"""The optional extension: built where there is a compiler, left out where there is none."""

from setuptools import setup

try:
    from pybind11.setup_helpers import Pybind11Extension
except ImportError:  # Only an environment without build isolation lacks it.
    extensions = []
else:
    extensions = [
        Pybind11Extension(
            "neox_data._native",
            ["src/neox_data/csrc/native.cpp"],
            depends=[
                f"src/neox_data/csrc/{name}"
                for name in ("sample_reader.h", "scan.h", "scan_kernel.inc", "shuffle.h", "tournament.h")
            ],
            cxx_std=17,
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
        )
    ]

setup(ext_modules=extensions)

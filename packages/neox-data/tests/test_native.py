"""The extension is there wherever it can be: tests that compare it with numpy skip only where it cannot."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from neox_data.native import load_native

HEADER = Path(sysconfig.get_path("include"), "Python.h")


@pytest.mark.skipif(shutil.which("g++") is None or not HEADER.is_file(), reason="no compiler, or no Python.h")
def test_where_there_is_a_compiler_the_extension_was_built() -> None:
    assert load_native() is not None

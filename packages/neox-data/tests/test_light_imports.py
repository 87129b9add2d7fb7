"""The commands start without torch, and so does everything but the loader."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    ["neox_data", "neox_data.cli", "neox_data.preprocess.cli", "neox_data.blend", "neox_data.sampler"],
)
def test_torch_is_not_imported(module: str) -> None:
    check = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0

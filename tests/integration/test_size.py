"""tools/size.py --trace: a real training passes the configuration on as often as CONTRIBUTING.md states."""

import subprocess
import sys

import pytest

from support.sources import ROOT

pytestmark = pytest.mark.slow


def test_traced_numbers_are_as_stated():
    command = [sys.executable, ROOT / "tools/size.py", "--trace", "--check"]
    found = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr

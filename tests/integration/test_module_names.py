"""Packages with one main command answer `python -m PACKAGE` as that command."""

import subprocess
import sys

import pytest

COMMANDS = {"neox_launcher": "neox-launch", "neox_data": "neox-data", "neox_kernels": "neox-kernels"}


@pytest.mark.parametrize("package", COMMANDS)
def test_a_package_is_its_command(package):
    call = [sys.executable, "-m", package]
    done = subprocess.run([*call, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"Usage: {COMMANDS[package]} ")
    done = subprocess.run([*call, "--no-such-option"], capture_output=True, text=True)
    assert done.returncode == 2

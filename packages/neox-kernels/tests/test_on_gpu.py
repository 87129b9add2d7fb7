"""benchmarks/kernels.py, which checks and times the operators, on a GPU and rehearsed on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "kernels.py"


def run_script(*options, timeout):
    if not SCRIPT.is_file():
        pytest.skip("the package is tested apart from its repository, which holds the script")
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.gpu
def test_operators_are_correct_on_this_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert " 0 wrong" in run_script("--verify", timeout=600)


def test_script_passes_its_rehearsal(tmp_path):
    figures = tmp_path / "figures.json"
    output = run_script("--rehearse", "--verify", "--time", "--json", str(figures), timeout=300)
    assert " 0 wrong" in output
    assert output.count("| forward |") >= 10
    assert figures.stat().st_size > 1000

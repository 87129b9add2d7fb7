"""The estimate of a device's memory is what the tensors of real processes take, at each ZeRO stage."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory.py"
# The default of the script is a model of 100M parameters.
SMALL = ("--hidden=256", "--layers=4", "--vocabulary=2048")


def ratios_of(*options: str) -> dict[str, float]:
    """Measured bytes over estimated ones by stage of ZeRO."""
    command = [sys.executable, SCRIPT, *SMALL, *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert result.returncode == 0, result.stderr
    return {found[1]: float(found[2]) for found in re.finditer(r"(ZeRO \d).* ([\d.]+)\n", result.stdout)}


@pytest.mark.slow
def test_the_peak_of_tensors_is_the_estimated_one_within_5_percent():
    ratios = ratios_of()
    assert list(ratios) == [f"ZeRO {stage}" for stage in range(4)]
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), abs=0.05)


@pytest.mark.parametrize(
    "precision", [pytest.param("fp32", marks=pytest.mark.sweep), pytest.param("bf16", marks=pytest.mark.slow)]
)
def test_a_teacher_is_part_of_the_peak(precision):
    ratios = ratios_of("--teacher-layers=6", "--stages", "0", "3", f"--precisions={precision}")
    assert list(ratios) == ["ZeRO 0", "ZeRO 3"]
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), abs=0.05)

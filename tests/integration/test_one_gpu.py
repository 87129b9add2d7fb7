"""benchmarks/one_gpu.py, rehearsed on the CPU: every kind of case trains, and the table's figures agree."""

import importlib
import os
import subprocess
import sys

import pytest

from neox_config import resolve
from neox_config.estimate.operations import flops_per_token
from neox_config.estimate.shapes import shape_of
from neox_model import load_config
from support.sources import ROOT

SCRIPT = ROOT / "benchmarks" / "one_gpu.py"


def run_script(*options):
    return subprocess.run(
        [sys.executable, SCRIPT, *options],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.slow
def test_the_rehearsal_times_each_case_and_compares_it_with_the_plain_model():
    cases = ["pythia-160m/uncompiled", "pythia-160m/plain", "llama-3.2-1b/kernels", "neox-1.3b/deterministic"]
    done = run_script("--rehearse", *cases)
    assert done.returncode == 0, done.stderr
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()
    ]
    found = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert list(found) == cases
    # Two samples of 64 tokens.
    milliseconds = {case: float(row["ms"]) for case, row in found.items()}
    for case, row in found.items():
        assert float(row["tokens/s"].replace(",", "")) == pytest.approx(128e3 / milliseconds[case], rel=0.02)
        # There is no GPU to ask.
        assert row["peak GiB"] == row["MFU"] == row["waits"] == ""
    ours, plain = found[cases[0]], found[cases[1]]
    expected = milliseconds[cases[1]] / milliseconds[cases[0]]
    assert float(ours["against plain"]) == pytest.approx(expected, abs=0.02)
    assert plain["against plain"] == "1.00"
    assert found[cases[2]]["against plain"] == ours["against plain-compiled"] == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rehearse", "llama-3.2-1b/plain"), "llama-3.2-1b/plain is not a case"),
        (("pythia-160m/compiled",), "there is no GPU"),
    ],
)
def test_what_cannot_be_timed_is_refused(options, message):
    done = run_script(*options)
    assert done.returncode == 2
    assert message in done.stderr


def test_operations_are_those_of_the_estimate_with_causal_attention(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    for shape in importlib.import_module("one_gpu").SHAPES.values():
        resolved = resolve(load_config(shape.configuration()), devices=1)
        whole = flops_per_token(shape_of(resolved, vocab_size=shape.vocabulary))
        hidden_half = 6 * shape.layers * shape.length * shape.hidden
        assert shape.operations_per_token + hidden_half == whole

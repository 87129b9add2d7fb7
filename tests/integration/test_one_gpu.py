"""benchmarks/one_gpu.py, rehearsed on the CPU: every kind of case trains, and the figures agree."""

import gzip
import importlib
import json
import os
import subprocess
import sys

import pytest
import torch

from support.refusals import shows
from support.sources import ROOT

SCRIPT = ROOT / "benchmarks" / "one_gpu.py"


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("one_gpu")


def run_script(*options):
    return subprocess.run(
        [sys.executable, SCRIPT, *options],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        check=False,
    )


def tables(text):
    """Return the rows of each table, by the names of their columns."""
    found = []
    for block in text.strip().split("\n\n"):
        head, _, *rows = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
        ]
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


@pytest.mark.slow
def test_the_rehearsal_times_each_case_and_compares_it_with_the_plain_model(tmp_path):
    cases = ["pythia-160m/uncompiled", "pythia-160m/plain", "llama-3.2-1b/kernels", "neox-1.3b/deterministic"]
    more = [
        "--accumulation",
        "1",
        "3",
        "--set",
        "no-weight-tying=true",
        "--profile",
        str(tmp_path / "traces"),
    ]
    done = run_script("--rehearse", *cases, *more, "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr
    shown, classes = tables(done.stdout)
    written = json.loads((tmp_path / "figures.json").read_text())
    expected = [(case, accumulation) for case in cases for accumulation in (1, 3)]
    assert [(row["case"], row["accumulation"]) for row in written["rows"]] == expected
    assert [(row["case"], int(row["accumulation"])) for row in shown] == expected
    assert (written["device"], written["precision"]) == ("the CPU", "fp32")
    # A build with CUDA has it, without a GPU, too.
    assert written["cudnn"] == torch.backends.cudnn.version()
    for row, text in zip(written["rows"], shown, strict=True):
        # Two samples of 64 tokens; the table has a tenth of a millisecond.
        assert row["tokens_per_second"] == pytest.approx(128e3 / row["micro_batch_ms"])
        assert float(text["ms per micro-batch"]) == pytest.approx(row["micro_batch_ms"], abs=0.051)
        update = row["accumulation"] * row["micro_batch_ms"]
        assert float(text["ms per update"]) == pytest.approx(update, abs=0.051)
        # There is no GPU to ask.
        assert row["peak_gib"] is row["mfu_full"] is row["mfu_causal"] is row["waits"] is None
        assert set(row["classes"].values()) == {0.0}
    times = {(row["case"], row["accumulation"]): row["micro_batch_ms"] for row in written["rows"]}
    for text in shown:
        accumulation = int(text["accumulation"])
        is_peer = text["case"].startswith("pythia-160m")
        ratio = times[cases[1], accumulation] / times[text["case"], accumulation] if is_peer else None
        assert text["against plain"] == ("" if ratio is None else f"{ratio:.2f}")
    assert {row["products"] for row in classes} == {"0.0"}
    for case, accumulation in expected:
        trace = tmp_path / "traces" / f"{case.replace('/', '-')}-{accumulation}.json.gz"
        with gzip.open(trace, "rt") as file:
            names = [event["name"] for event in json.load(file)["traceEvents"]]
        assert names.count("aten::embedding") == 2 * accumulation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rehearse", "llama-3.2-1b/compiled-bias-gelu"), "llama-3.2-1b/compiled-bias-gelu is not a case"),
        (("--rehearse", "--accumulation", "0"), "--accumulation must be at least 1"),
        (("--rehearse", "--set", "seq_length=32"), "--set seq_length changes what is compared"),
        (("pythia-160m/compiled",), "there is no GPU"),
    ],
)
def test_what_cannot_be_timed_is_refused(options, message):
    done = run_script(*options)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
def test_a_case_that_fails_leaves_the_others(tmp_path):
    file = tmp_path / "figures.json"
    cases = ("pythia-160m/kernels", "pythia-160m/plain")
    # Only ours has parameters.
    done = run_script("--rehearse", *cases, "--accumulation", "1", "--set", "nonsense=1", "--json", str(file))
    assert done.returncode == 1
    assert shows(done.stderr, "pythia-160m/kernels", "accumulation 1")
    assert [row["case"] for row in json.loads(file.read_text())["rows"]] == ["pythia-160m/plain"]


@pytest.mark.parametrize(
    ("shape", "milliseconds", "full", "causal"),
    [
        # 6 x (matrices + 2 or 1 x layers x length x hidden) x tokens per second / 989e12, computed by hand.
        ("neox-1.3b", 291.7, 0.515, 0.481),
        ("llama-3.2-1b", 284.3, 0.526, 0.479),
        ("pythia-160m", 75.3 * 2, 0.426 / 2, 0.376 / 2),
    ],
)
def test_utilization_is_given_by_both_conventions(one_gpu, shape, milliseconds, full, causal):
    case = one_gpu.Case(
        name=f"{shape}/compiled", shape=one_gpu.SHAPES[shape], accumulation=1, precision="bfloat16"
    )
    found = one_gpu.Figures(seconds=milliseconds / 1e3, peak_gib=45.1, waits=1, classes=None)
    row = one_gpu.row_of(case, found, 989.0)
    assert (row["mfu_full"], row["mfu_causal"]) == pytest.approx((full, causal), abs=5e-4)
    (text,) = tables(one_gpu.table([row]))[0]
    assert (text["MFU (full)"], text["MFU (causal)"]) == (
        f"{row['mfu_full']:.1%}",
        f"{row['mfu_causal']:.1%}",
    )


def test_each_case_can_be_loaded(one_gpu):
    for name in one_gpu.CASES:
        shape, _, form = name.partition("/")
        if form not in one_gpu.PLAIN_FORMS:
            one_gpu.loaded(
                one_gpu.TRAINING
                | one_gpu.SHAPES[shape].settings
                | one_gpu.SHAPES[shape].sizes
                | one_gpu.form_settings(form)
            )
    assert "neox-1.3b/compiled-bias-gelu" in one_gpu.CASES
    assert "llama-3.2-1b/compiled-bias-gelu" not in one_gpu.CASES

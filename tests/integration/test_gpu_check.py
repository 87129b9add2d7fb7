"""`make gpu-check`: rehearsed on the CPU, and made to fail in every way that its report must show."""

import dataclasses
import os
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import gpu_check
import gpu_training
from gpu_check import SECTIONS, Check, run_sections
from gpu_report import Result, describe_machine, exit_code
from gpu_training import (
    COMPARED,
    LIMITS,
    PRECISIONS,
    compare_runs,
    run_path,
    train_architectures,
)
from neox_kernels import Availability, choice, rms_norm
from neox_kernels.status import describe
from support.distributed import run_ranks
from support.refusals import refused, shows

ROOT = Path(__file__).parents[2]
MACHINE = {"date": "today"}


@pytest.fixture
def check(tmp_path):
    return Check(rehearses=True, gpus=0, memory_mib=0, folder=tmp_path)


def make(*arguments, **variables):
    return subprocess.run(
        ["make", "--no-print-directory", "gpu-check", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=1500,
    )


@pytest.mark.recipe
def test_the_rehearsal_passes_and_reports_every_section(tmp_path):
    report = tmp_path / "report.md"
    done = make(REHEARSE="1", REPORT=str(report))
    assert done.returncode == 0, done.stderr + report.read_text()
    text = report.read_text()
    results = {name: re.search(rf"^\| {name} \| ([a-z ]+) \|", text, re.MULTILINE)[1] for name in SECTIONS}
    assert (results.pop("Tests marked gpu"), results.pop("Waiting")) == ("not run", "not run")
    assert set(results.values()) == {"passed"}
    assert "No GPU" in text
    assert f"| torch | {version('torch')} |" in text
    # A source archive has no commit.
    assert re.search(r"^\| commit \| ([0-9a-f]{40}|unknown)", text, re.MULTILINE)
    assert list(tmp_path.iterdir()) == [report]


def test_a_source_archive_is_described_without_a_commit(tmp_path):
    facts = describe_machine(tmp_path)
    assert (facts["commit"], facts["torch"]) == ("unknown", version("torch"))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_runs_and_the_message_has_a_remedy(tmp_path):
    done = make(REPORT=str(tmp_path / "report.md"))
    assert done.returncode != 0
    assert shows(done.stderr, "gpu-check", "GPU")
    assert "REHEARSE=1 make gpu-check" in done.stderr
    assert list(tmp_path.iterdir()) == []


# Planted failures


def test_a_section_that_fails_or_breaks_is_reported_and_the_others_still_run(check, tmp_path):
    ran = []

    def breaks(check):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def passes(check):
        ran.append("last")
        return Result("passed", "one thing was right", "| figures |")

    sections = {
        "Breaks": breaks,
        "Fails": lambda check: Result("failed", "2 of 3 are wrong", "why | how"),
        "Passes": passes,
    }
    report = tmp_path / "report.md"
    assert run_sections(sections, check, report=report, machine=MACHINE) == 1
    text = report.read_text()
    assert ran == ["last"]
    assert "**Failed.**" in text
    assert "Breaks | failed" in text
    assert re.search(r"\| Fails \| failed \| \d+ s \| 2 of 3 are wrong \|", text)
    assert re.search(r"\| Passes \| passed \| \d+ s \| one thing was right \|", text)
    assert "RuntimeError: CUDA error" in text


@pytest.mark.parametrize(
    ("statuses", "code"),
    [(["passed", "not run"], 0), (["not run"], 1), ([], 1), (["passed", "failed"], 1)],
)
def test_the_exit_code_is_0_only_where_something_ran_and_nothing_failed(statuses, code):
    assert exit_code({str(number): Result(status, "") for number, status in enumerate(statuses)}) == code


def plant_runs(monkeypatch, spoil):
    """In place of runs, runs whose second side is spoilt: takes and gives losses and changes."""

    def run_ranks(function, *, architectures, precisions, folder, side, **_):
        generator = torch.Generator().manual_seed(0)
        for architecture in architectures:
            for precision in precisions:
                changes = {name: torch.randn(4, 4, generator=generator) for name in ("qkv", "head")}
                run = {"losses": [2.0, 1.5], "changes": changes | {"bias": torch.full((4,), 1e-4)}}
                if side == "second":
                    spoil(run)
                torch.save(run, run_path(Path(folder), architecture, precision, side))
        return [dict.fromkeys(f"{a} / {p}" for a in architectures for p in precisions)]

    monkeypatch.setattr(gpu_check, "run_ranks", run_ranks)


def halve_head(run):
    run["changes"]["head"] *= 0.5


def turn_qkv(run):
    run["changes"]["qkv"] = run["changes"]["qkv"].flip(0)


def lose_gradient(run):
    run["changes"]["head"].zero_()


def move_small(run):
    run["changes"]["bias"] += 0.1


def spoil_loss(run):
    run["losses"][1] += 0.1


def make_nan(run):
    run["changes"]["qkv"][0, 0] = float("nan")


@pytest.mark.parametrize("spoil", [halve_head, turn_qkv, lose_gradient, move_small, spoil_loss, make_nan])
def test_devices_that_train_differently_fail_the_check(check, monkeypatch, spoil):
    plant_runs(monkeypatch, spoil)
    result = gpu_check.devices_agree(check)
    assert result.status == "failed"
    assert result.summary.startswith("0 of 6 trainings")


def test_devices_with_equal_trainings_pass(check, monkeypatch):
    plant_runs(monkeypatch, lambda run: None)
    assert gpu_check.devices_agree(check).status == "passed"


def test_a_training_that_fails_is_reported_with_its_error(check, monkeypatch):
    def run_ranks(function, **_):
        return [{"one / fp16": "RuntimeError: no such kernel"}]

    monkeypatch.setattr(gpu_check, "run_ranks", run_ranks)
    result = gpu_check.devices_agree(check)
    assert result.status == "failed"
    assert "no run to" in result.details
    assert "no such kernel" in result.details


@pytest.mark.parametrize("weight", [0.01, float("nan")])
def test_a_layout_that_trains_another_model_fails_the_check(check, monkeypatch, weight):
    def run_ranks(function, *, size, **_):
        if function is gpu_training.train_reference:
            return [[1.0, 0.5]]
        return [{"losses": [1.0, 0.5], "weight": weight if rank == size - 1 else 0.0} for rank in range(size)]

    monkeypatch.setattr(gpu_check, "run_ranks", run_ranks)
    result = gpu_check.layouts_agree(check)
    assert result.status == "failed"
    assert result.summary.startswith("0 of 2 layouts")


def test_a_contender_that_fails_fails_the_benchmark(check, monkeypatch):
    done = gpu_check._Done("train.py", 0, "contender ...", "round 1, ours/fp32: failed\n")
    monkeypatch.setattr(gpu_check, "_run", lambda check, *argv: done)
    result = gpu_check.training_speed(check)
    assert result.status == "failed"
    assert "ours/fp32: failed" in result.details


def test_a_kernel_that_is_wrong_fails_the_check(check, monkeypatch):
    done = gpu_check._Done("neox-kernels status", 0, "rms_norm   WRONG: output differs by 0.1", "")
    monkeypatch.setattr(gpu_check, "_run", lambda check, *argv: done)
    assert gpu_check.kernels(check).status == "failed"


@pytest.mark.parametrize(("status", "result"), [("correct; 0.1 ms", "passed"), ("unavailable", "failed")])
def test_kernels_that_are_all_unavailable_fail_the_check(check, monkeypatch, status, result):
    monkeypatch.setattr(
        gpu_check,
        "_run",
        lambda check, *argv: gpu_check._Done(" ".join(argv), 0, f"rms_norm   {status}", ""),
    )
    on_gpu = dataclasses.replace(check, rehearses=False, gpus=1)
    assert gpu_check.kernels(on_gpu).status == result


@pytest.mark.slow
def test_the_status_of_kernels_has_the_word_that_the_check_expects(monkeypatch):
    ready = dataclasses.replace(
        rms_norm, availability=lambda device, dtype, *, may_build: Availability(True, "for this test")
    )
    monkeypatch.setattr(choice, "graph_ms", lambda run: 1.0)
    assert describe(ready, torch.float32).startswith("correct; ")


def test_a_resume_that_differs_fails_the_check(check, monkeypatch):
    done = gpu_check._Done("neox-launch verify-resume", 1, "verdict: the runs differ", "")
    monkeypatch.setattr(gpu_check, "_run", lambda check, *argv: done)
    result = gpu_check.resumes_exactly(check)
    assert result.status == "failed"
    assert "the runs differ" in result.details


def test_a_training_that_waits_fails_the_check(check, monkeypatch):
    monkeypatch.setattr(gpu_check, "run_ranks", lambda function, **_: [{"one": [], "two": ["step.py:7"]}])
    result = gpu_check.steps_do_not_wait(dataclasses.replace(check, rehearses=False, gpus=1))
    assert (result.status, result.summary[:6]) == ("failed", "1 of 2")
    assert "two | step.py:7" in result.details


@pytest.mark.slow
def test_limits_distinguish_float32_from_16_bit_and_allow_its_rounding(tmp_path):
    [architecture] = COMPARED[:1]
    options = {"architectures": [architecture], "precisions": list(PRECISIONS), "folder": str(tmp_path)}
    [errors] = run_ranks(train_architectures, size=1, side="first", is_varied=False, **options)
    assert not any(errors.values())
    fp32, bf16, fp16 = (run_path(tmp_path, architecture, name, "first") for name in ("fp32", "bf16", "fp16"))
    for precision, run in (("bf16", bf16), ("fp16", fp16)):
        found = compare_runs(fp32, run)
        assert "loss" in LIMITS["fp32"].exceeded_by(found)
        assert LIMITS[precision].exceeded_by(found) == []


def test_runs_of_other_models_are_not_compared(tmp_path):
    for side, names in {"first": ["a"], "second": ["a", "b"]}.items():
        run = {"losses": [1.0], "changes": {name: torch.ones(2) for name in names}}
        torch.save(run, tmp_path / side)
    with refused(ValueError, "other weights"):
        compare_runs(tmp_path / "first", tmp_path / "second")

"""Results of trials are stored and reused, and the best is reported."""

import json
from dataclasses import replace

import pytest

from neox_config.errors import LaunchError
from neox_launcher.autotuning.report import render_results
from neox_launcher.autotuning.results import Result, Results, best_of
from neox_launcher.autotuning.space import Experiment
from support.refusals import refused, shows

EXPERIMENT = Experiment(zero_stage=1, micro_batch=4, accumulation=2, overlap_comm=True)
MEASURED = Result(
    experiment=EXPERIMENT,
    status="measured",
    seconds=0.5,
    samples_per_second=32.0,
    tflops_per_device=120.0,
    fingerprint="a",
)
FAILED = Result(
    experiment=replace(EXPERIMENT, micro_batch=8), status="failed", reason="a host is gone", fingerprint="b"
)
TOO_LARGE = Result(
    experiment=replace(EXPERIMENT, micro_batch=16), status="out of memory", reason="8 GiB", fingerprint="c"
)


def kept(folder, *results):
    found = Results(folder, overwrite=False)
    for result in results:
        found.add(result)
    return Results(folder, overwrite=False)


def test_a_reused_result_is_marked(tmp_path):
    assert kept(tmp_path / "new", MEASURED).of("a") == replace(MEASURED, was_reused=True)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["results.json"]


def test_failed_trials_are_not_reused(tmp_path):
    found = kept(tmp_path, MEASURED, FAILED, TOO_LARGE)
    assert [found.of(mark) is not None for mark in "abcd"] == [True, False, True, False]


def test_the_file_contains_the_settings(tmp_path):
    kept(tmp_path, MEASURED)
    (record,) = json.loads((tmp_path / "results.json").read_text())
    assert record["name"] == "zero1-micro4-accumulate2-overlap"
    assert record["settings"]["zero_optimization.overlap_comm"] is True
    assert record["samples_per_second"] == 32.0


def test_overwrite_ignores_earlier_results(tmp_path):
    kept(tmp_path, MEASURED)
    assert Results(tmp_path, overwrite=True).of("a") is None


@pytest.mark.parametrize("text", ["[", "{}x", '[{"a": 1}]', "[5]", '[{"experiment": {"x": 1}}]'])
def test_an_unrelated_file_is_not_overwritten(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with refused(LaunchError, code="other-file"):
        Results(tmp_path, overwrite=False)
    assert (tmp_path / "results.json").read_text() == text


def test_a_folder_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(LaunchError, "file/results.json", code="not-readable"):
        Results(tmp_path / "file", overwrite=False).add(MEASURED)


@pytest.mark.parametrize(
    ("metric", "best"), [("throughput", "large"), ("latency", "small"), ("flops", "small")]
)
def test_the_best_result_depends_on_the_metric(metric, best):
    small = replace(MEASURED, seconds=0.25, samples_per_second=16.0, tflops_per_device=130.0)
    named = {"small": small, "large": MEASURED}
    assert best_of([FAILED, MEASURED, small], metric) == named[best]


def test_nothing_measured_has_no_best():
    assert best_of([FAILED, TOO_LARGE], "throughput") is None
    assert "no trial succeeded" in render_results([FAILED], "throughput")
    assert shows(render_results([], "throughput"), "no trial has")


def test_the_report_ends_with_the_best_as_settings(snapshot):
    worse = replace(MEASURED, experiment=replace(EXPERIMENT, zero_stage=2), samples_per_second=30.0)
    assert render_results([worse, FAILED, MEASURED], "throughput") == snapshot

"""Parts of `make gpu-minutes` that are killed leave the figures that they had measured."""

import importlib
import json
import sys
from types import SimpleNamespace

import pytest

from support.distributed import DistributedFailure
from support.sources import ROOT


class Killed(BaseException):
    """What ends a part at once."""


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Import a script of benchmarks/ that is called with these arguments."""

    def load(name, *arguments):
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
        monkeypatch.setattr(sys, "argv", [name, "--json", str(tmp_path / "figures.json"), *arguments])
        return importlib.import_module(name)

    return load


def test_kernels_that_were_checked_and_timed_are_kept(program, monkeypatch, tmp_path):
    kernels = program(
        "kernels", "--rehearse", "--verify", "--time", "--operators", "cross_entropy", "rms_norm"
    )

    def measure_one(operator, *arguments):
        if operator.name == "rms_norm":
            raise Killed
        return [kernels.Figure(operator.name, "forward", 256.0, 1800.0, 0.54, None, None)]

    monkeypatch.setattr(kernels, "verify", lambda *arguments: SimpleNamespace(passed=7, failed=["a check"]))
    monkeypatch.setattr(kernels, "measure", measure_one)
    with pytest.raises(Killed):
        kernels.main()
    kept = json.loads((tmp_path / "figures.json").read_text())
    assert (kept["right"], kept["wrong"]) == (7, ["a check"])
    assert {figure["operator"] for figure in kept["figures"]} == {"cross_entropy"}


def test_layouts_that_ended_are_kept_whatever_the_others_do(program, monkeypatch, tmp_path):
    ranks = program("gpu_ranks")
    file = tmp_path / "figures.json"
    found = {
        "tensor 2": (1e-7, 2e-7),
        "torch, ZeRO 1": DistributedFailure("rank 1 hangs"),
        "torch, ZeRO 2": (float("nan"), 0.0),
        "torch, ZeRO 3": (0.0, float("nan")),
        "torch, pipeline 2": Killed(),
    }

    def compare_layout(architecture, layout, *arguments):
        if isinstance(found[layout], BaseException):
            raise found[layout]
        return found[layout]

    monkeypatch.setattr(ranks, "compare_layout", compare_layout)
    monkeypatch.setattr(ranks, "AT_A_TIME", 1)
    with pytest.raises(Killed):
        ranks.compare(None, tmp_path, ranks.Rows(file))
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["tensor 2"]["value"] == 2e-7
    assert "rank 1 hangs" in rows["torch, ZeRO 1"]["note"]
    for name in ("torch, ZeRO 2", "torch, ZeRO 3"):
        assert rows[name]["note"].startswith("FAILED: differs from one rank"), name

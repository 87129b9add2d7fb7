"""The worker of `coord-check`: activations of small copies, with a fault that it finds."""

import json
from dataclasses import replace

import pytest

from neox_config import encode_resolved, load_config, resolve
from neox_launcher.coord_check.check import copies_of
from neox_launcher.protocol.coordinate_check import CoordinateRequest
from neox_model.coord_check import run as coord_check
from neox_model.parallel.groups import SINGLE_PROCESS
from support.settings import TINY

WIDTHS = (16, 64)


@pytest.fixture
def slopes(tmp_path, monkeypatch):
    """Return a function that runs the worker, and returns its slopes by parametrization and kind."""
    monkeypatch.chdir(tmp_path)

    def run(**settings):
        path = tmp_path / "job.yml"
        sizes = {"hidden_size": 8, "num_attention_heads": 1, "init_method_std": 0.1}
        optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 0.003}}}
        path.write_text(json.dumps(TINY | sizes | optimizer | settings))
        copies = {
            name: {
                width: encode_resolved(resolve(copy, devices=1))
                for width, copy in copies_of(load_config([path]), WIDTHS, steps=3, use_mup=uses).items()
            }
            for name, uses in (("muP", True), ("without muP", False))
        }
        request = CoordinateRequest(copies=copies, page=str(tmp_path / "page.html"))
        for name, value in request.as_variables().items():
            monkeypatch.setenv(name, value)
        reported = []
        monkeypatch.setattr(coord_check, "report_facts", lambda rank, facts: reported.append(facts))
        coord_check.check_in(SINGLE_PROCESS, resolve(load_config([path]), devices=1))
        (facts,) = reported
        return {(each["parametrization"], each["kind"]): each["slope"] for each in facts["growths"]}

    return run


@pytest.mark.slow
def test_changes_do_not_grow_with_the_width_under_mup_and_do_without(slopes, tmp_path):
    found = slopes()
    kinds = {kind for _, kind in found}
    assert kinds == {"embedding", "attention", "mlp", "layer", "final norm", "logits"}
    for kind in ("attention", "mlp", "layer"):
        assert abs(found["muP", kind]) < 0.25, found
        assert found["without muP", kind] > 0.6, found
    page = (tmp_path / "page.html").read_text()
    assert page.count("<figure") == 2 * 2 * len(kinds)
    assert "at width 16" in page


@pytest.mark.slow
def test_rates_that_do_not_follow_the_width_are_found(slopes, monkeypatch):
    from neox_model.assembly import optimizer

    usual = optimizer.split_by_multipliers

    def same_rates(groups, multipliers_of, *, eps):
        return usual(groups, lambda parameter: replace(multipliers_of(parameter), rate=1.0), eps=eps)

    monkeypatch.setattr(optimizer, "split_by_multipliers", same_rates)
    assert slopes()["muP", "mlp"] > 0.4

"""The copies of `coord-check`, and its verdict, with a worker that answers at once."""

from dataclasses import asdict

import pytest
import yaml

from neox_config import decode_resolved, encode_resolved, load_config, resolve
from neox_config.errors import LaunchError
from neox_launcher.coord_check.check import CoordinateCheck, check_coordinates, copies_of
from neox_launcher.protocol.coordinate_check import CoordinateRequest, Growth
from neox_launcher.protocol.outcome import Outcome
from support.refusals import refused, shows
from support.settings import TINY

GROUPED = TINY | {"num_attention_heads": 6, "num_kv_heads": 2, "mlp_width": 72, "activation": "swiglu"}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "job.yml"
    file.write_text(yaml.safe_dump(GROUPED | {"precision": "bfloat16", "model_parallel_size": 2}))
    return str(file)


def test_copies_grow_in_proportion_from_the_first(path):
    config = load_config([path])
    copies = copies_of(config, (48, 96, 192), steps=4, use_mup=True)
    sizes = [
        (model.hidden_size, model.num_attention_heads, model.num_kv_heads, model.mlp_width)
        for model in (copy.model for copy in copies.values())
    ]
    assert sizes == [(48, 6, 2, 144), (96, 12, 4, 288), (192, 24, 8, 576)]
    bases = [copy.mup.mup_base.model_dump() for copy in copies.values()]
    expected = {"hidden_size": 48, "num_attention_heads": 6, "head_dim": 8, "mlp_width": 144}
    assert bases == [expected | {"num_layers": 2}] * 3
    assert {copy.precision.is_bf16 for copy in copies.values()} == {False}
    assert {copy.training.exit_interval for copy in copies.values()} == {4}
    plain = copies_of(config, (48, 96), steps=4, use_mup=False)
    assert {copy.mup.use_mup for copy in plain.values()} == {False}


def test_a_width_that_heads_do_not_divide_is_refused(path):
    with refused(LaunchError, "--widths 64", "48", code="invalid-width"):
        copies_of(load_config([path]), (48, 64), steps=1, use_mup=True)


def growth(parametrization, slope, kind="mlp", is_hidden=True):
    changes = {"48": 0.5, "96": 0.25}
    return Growth(
        parametrization=parametrization, kind=kind, changes=changes, slope=slope, is_hidden=is_hidden
    )


@pytest.mark.parametrize(
    ("growths", "code"),
    [
        ([growth("muP", 0.05), growth("without muP", 0.9)], 0),
        ([growth("muP", -0.2, "logits", is_hidden=False)], 0),
        ([growth("muP", -0.06)], 1),
        ([growth("muP", None)], 1),
    ],
)
def test_a_slope_of_a_hidden_layer_over_the_limit_is_exit_code_1(path, capsys, tmp_path, growths, code):
    seen = []

    def worker(plan):
        seen.append(plan)
        return Outcome(exit_code=0, facts={0: {"growths": [asdict(each) for each in growths]}})

    wanted = CoordinateCheck(paths=(path,), widths=(48, 96), page=tmp_path / "page.html")
    assert check_coordinates(wanted, run=worker).exit_code == code
    printed = capsys.readouterr().out
    assert shows(printed, "48", "96", "0.5", "0.25", str(wanted.page))
    assert ("is not within 0.05 of 0" in printed) is bool(code)
    (plan,) = seen
    variables = plan.environment
    (text,) = [variables[CoordinateRequest.VARIABLE]]
    assert plan.world.size == 1
    assert '"page"' in text
    request = CoordinateRequest(copies={"muP": {48: "x"}}, page="p")
    assert request.as_variables().keys() == {CoordinateRequest.VARIABLE}


def test_a_request_is_read_as_it_was_sent(monkeypatch, path):
    copies = copies_of(load_config([path]), (48, 96), steps=1, use_mup=True)

    encoded = {width: encode_resolved(resolve(copy, devices=1)) for width, copy in copies.items()}
    request = CoordinateRequest(copies={"muP": encoded}, page="p.html")
    for name, value in request.as_variables().items():
        monkeypatch.setenv(name, value)
    read = CoordinateRequest.from_environment()
    assert read == request
    assert decode_resolved(read.copies["muP"][96]).model.width == 96


def test_a_failed_run_has_its_own_exit_code(path):
    wanted = CoordinateCheck(paths=(path,), widths=(48, 96))
    assert check_coordinates(wanted, run=lambda plan: Outcome(exit_code=3)).exit_code == 3

"""The verdict of `verify-layout`, with workers that answer at once."""

import json
import subprocess
import sys

import pytest
import yaml

from neox_config import decode_resolved
from neox_config.errors import LaunchError, NeoXError
from neox_launcher.protocol.layout_verification import Finding, LayoutAnswer, LayoutRequest, Part
from neox_launcher.protocol.outcome import Outcome
from neox_launcher.verify_layout import verify
from neox_launcher.verify_layout.verify import LayoutVerification, case_of, plan_of, verify_layouts
from support.refusals import refused, shows
from support.settings import TINY


@pytest.fixture
def path(tmp_path):
    """A configuration with tensor parallelism, in two replicas."""
    file = tmp_path / "job.yml"
    file.write_text(yaml.safe_dump(TINY | {"model_parallel_size": 2, "engine": "torch"}))
    return str(file)


def answer(is_wrong):
    part = Part(name="loss", compared=6, differing=int(is_wrong), worst=0.5, limit=1e-10)
    findings = (Finding(what="loss, step 1", meaning="it differs"),) if is_wrong else ()
    return LayoutAnswer(parts=(part,), findings=findings)


def workers_that_differ_with_tensor_parallelism(plan):
    facts = answer(plan.resolved.run.layout.tensor > 1).as_facts()
    return Outcome(exit_code=0, facts={0: facts})


def test_a_difference_is_narrowed_down_by_leaving_out_each_kind_of_parallelism(path, capsys):
    wanted = LayoutVerification(paths=(path,))
    outcome = verify_layouts(wanted, run=workers_that_differ_with_tensor_parallelism)
    assert outcome.exit_code == 1
    printed = capsys.readouterr().out
    assert shows(printed, "2 x", "1 x", "2, 4")
    end = "  loss, step 1\n      it differs\n  with tp=1,sp=false: agrees\n  with dp=1: differs, too\n"
    assert end in printed


def test_agreement_is_exit_code_0(path, capsys):
    wanted = LayoutVerification(paths=(path,), layouts=("tp=1", "tp=1,dp=1"), as_json=True)
    assert verify_layouts(wanted, run=workers_that_differ_with_tensor_parallelism).exit_code == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(each["layout"], each["processes"], each["agrees"]) for each in shown] == [
        ("tp=1", 2, True),
        ("tp=1,dp=1", 1, True),
    ]


def test_a_part_that_differs_without_an_explanation_is_no_agreement():
    part = Part(name="loss", compared=6, differing=1, worst=0.5, limit=1e-10)
    assert not LayoutAnswer(parts=(part,)).agrees


def test_a_failed_run_has_its_own_exit_code(path):
    wanted = LayoutVerification(paths=(path,))
    assert verify_layouts(wanted, run=lambda plan: Outcome(exit_code=3)).exit_code == 3


def test_gpus_that_are_not_there_are_refused(path, monkeypatch):
    monkeypatch.setattr(verify, "count_gpus", lambda: 2)
    wanted = LayoutVerification(paths=(path,), on_gpus=True)
    with refused(LaunchError, "4 processes", "GPU", "2 visible", code="too-few-gpus"):
        case_of(wanted, "")
    assert case_of(wanted, "dp=1").gpus == 2


def test_float64_is_not_for_deepspeed(path):
    wanted = LayoutVerification(paths=(path,), precision="float64")
    with refused(LaunchError, "DeepSpeed's", "--precision", code="no-float64"):
        case_of(wanted, "engine=deepspeed")
    assert not case_of(LayoutVerification(paths=(path,)), "engine=deepspeed").in_float64


def test_the_workers_get_the_small_corpus_and_the_dropout_to_compare(path, tmp_path):
    wanted = LayoutVerification(paths=(path,), overrides=("hidden-dropout=0.1",))
    plan = plan_of(case_of(wanted, ""), tmp_path, 5)
    config = plan.resolved.config
    assert (config.data.data_path, config.tokenizer.vocab_file) == ("corpus", "tokenizer.json")
    assert (config.training.exit_interval, config.model.hidden_dropout) == (5, 0)
    request = LayoutRequest(**json.loads(plan.environment[LayoutRequest.VARIABLE]))
    dropping = decode_resolved(request.dropping).config
    assert (dropping.training.exit_interval, dropping.model.hidden_dropout) == (1, 0.1)
    assert (
        decode_resolved(request.reference).run.batch.accumulation == 2 * plan.resolved.run.batch.accumulation
    )
    paths = (
        "train-data-paths=[a]",
        "train-label-data-paths=[b]",
        "valid-data-paths=[a]",
        "valid-label-data-paths=[b]",
    )
    labelled = case_of(LayoutVerification(paths=(path,), overrides=paths), "").small.config.data
    assert (labelled.train_data_paths, labelled.train_label_data_paths) == (("corpus",), ("labels",))


def test_a_refusal_is_printed_before_the_end(tmp_path):
    """By a thread, which the end of the program would not wait for."""
    command = [sys.executable, "-c", "from neox_launcher.cli.launch import main; main()"]
    ended = subprocess.run(
        [*command, "verify-layout", "missing.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "missing.yml: 1 problem" in ended.stderr


def test_the_problems_of_a_layout_are_those_of_the_file(path):
    with refused(NeoXError, "job.yml", "among 5"):
        case_of(LayoutVerification(paths=(path,)), "tp=5")

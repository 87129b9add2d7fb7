"""`verify-resume --from --to` between kept checkpoints of a run that was evaluated on the way."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.planning import Request
from neox_launcher.protocol.outcome import Outcome
from neox_launcher.protocol.verification import Answer, Comparison
from neox_launcher.verify_resume.verify import VerifyRequest, verify_resume
from neox_model.checkpoint.comparison import SAMPLES_DIGEST
from neox_model.train import open_run
from neox_model.verify.run import compare
from support.checkpoint_edits import edit_manifest
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.refusals import shows
from support.resumes import plan_from, train_here
from support.settings import SMALL_TRAINING

pytestmark = pytest.mark.slow

SETTINGS = SMALL_TRAINING | {
    "split": "80,20,0",
    "train_iters": 20,
    "exit_interval": 4,
    "eval_interval": 1,
    "eval_iters": 1,
    "save_interval": 2,
    "log_interval": 1,
}


class Here:
    """Carries launches out in this process, and keeps the answer of the comparison."""

    answer: dict[str, Any]

    def __call__(self, plan: LaunchPlan) -> Outcome:
        with patch.dict(os.environ, plan.environment):
            if plan.program != "compare-trainings":
                train_here(plan)
                return Outcome(exit_code=0)
            self.answer = compare(Comparison.from_environment()).as_facts()
        return Outcome(exit_code=0, facts={0: self.answer})


def verify(path: Path, plan: LaunchPlan, *, evaluate: bool = False) -> dict[str, Any]:
    here, request = Here(), Request(program="train", paths=(str(path),))
    wanted = VerifyRequest(source="2", target="4", evaluate=evaluate)
    outcome = verify_resume(request, plan, wanted, dry_run=None, run=here)
    return here.answer | {"exit_code": outcome.exit_code}


def other_samples() -> Any:
    """Make the resumed run read the samples in the order of another seed."""
    build = open_run.build_datasets

    def built(resolved, **options):
        training = resolved.config.training.replaced(seed=99)
        return build(resolved.replaced(training=training), **options)

    return patch.object(open_run, "build_datasets", built)


def find_all(folder: str) -> dict[str, dict[str, Any]]:
    where = Path(folder)
    places = {"save": str(where / "kept"), "log_dir": str(where / "logs")}
    path = where / "job.yml"
    plan = plan_from(path, SETTINGS | places | {"data_path": write_corpus(where)})
    train_here(plan)
    found = {f"evaluate {yes}": verify(path, plan, evaluate=yes) for yes in (False, True)}
    with other_samples():
        found["other samples"] = verify(path, plan)
    kept = where / "kept" / "global_step4"
    edit_manifest(kept, "training", {}, without=("batch_sizes",))
    found["no batch sizes recorded"] = verify(path, plan)
    edit_manifest(kept, "training", {"validation_samples": 99})
    found["other validation samples"] = verify(path, plan, evaluate=True)
    metrics = where / "logs" / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines() if json.loads(line)["iteration"] <= 2]
    metrics.write_text("".join(f"{line}\n" for line in lines))
    edit_manifest(kept, "config", {SAMPLES_DIGEST: {}})
    found["nothing recorded"] = verify(path, plan)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("kept"))
    return run_ranks(find_all, size=1, timeout_seconds=600, folder=folder)[0]


def rows_of(result: dict[str, Any]) -> dict[str, Any]:
    names = ("checks", "first", "explanation")
    return {check.name: check for check in Answer.from_facts({name: result[name] for name in names}).checks}


@pytest.mark.parametrize("case", ["evaluate False", "evaluate True"])
def test_kept_checkpoints_with_evaluations_between_them_agree(found, case):
    result = found[case]
    assert (result["first"], result["exit_code"]) == ("", 0)
    rows = rows_of(result)
    assert rows["losses"].compared == "2 steps"
    assert rows["order of samples"].compared == "2 checkpoints"
    assert shows(rows["data"].skipped, "left no record")


def test_batch_sizes_that_an_older_version_did_not_record_are_computed(found):
    result = found["no batch sizes recorded"]
    assert (result["first"], result["exit_code"]) == ("", 0)


def test_the_number_of_validation_samples_is_compared_if_the_resumed_training_was_evaluated(found):
    result = found["other validation samples"]
    assert result["exit_code"] == 1
    assert "training.validation_samples" in result["first"]


def test_changed_order_of_samples_is_reported_before_its_consequences(found):
    result = found["other samples"]
    assert result["exit_code"] == 1
    assert result["first"].startswith("order of samples up to iteration 2: digest ")
    assert "the data files" in result["explanation"]


def test_comparisons_without_records_are_listed_as_skipped(found):
    result = found["nothing recorded"]
    assert (result["first"], result["exit_code"]) == ("", 0)
    rows = rows_of(result)
    for row in ("losses", "gradient norms", "learning rates"):
        assert shows(rows[row].skipped, "none of these")
    assert shows(rows["order of samples"].skipped, "no digest of")

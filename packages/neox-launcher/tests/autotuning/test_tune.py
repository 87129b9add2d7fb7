"""`neox-launch` with autotuning, with a fake runner that only writes times."""

import json
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from neox_config import load_config, resolve
from neox_config.errors import ConfigError, LaunchError
from neox_config.schema.config import all_parameters
from neox_launcher.autotuning import is_tuned
from neox_launcher.autotuning import tune as tune_trials
from neox_launcher.autotuning.space import Experiment
from neox_launcher.autotuning.trials import LEFT_OUT, describe
from neox_launcher.cli.launch import main
from neox_launcher.plan import planning
from neox_launcher.plan.planning import Request, plan_launch
from neox_launcher.protocol.outcome import Failure, Outcome
from support.refusals import refused

SETTINGS = """
autotuning: {enabled: true, num_tuning_micro_batch_sizes: 2, start_profile_step: 2, end_profile_step: 4}
tokenizer-type: CharLevelTokenizer
data-path: data
num-gpus: 2
pipe-parallel-size: 1
engine: deepspeed
save: checkpoints
save-interval: 5
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_data(folder, monkeypatch, minimal, can_train):
    monkeypatch.setattr(planning, "count_gpus", lambda environment: 0)
    minimal.write_text(minimal.read_text() + SETTINGS)


class Runner:
    """Fake training that writes 1 s for the first iteration and the given times for later ones.

    Args:
        seconds: by ZeRO stage and micro-batch; a text is a failure message, a negative number a signal.
    """

    def __init__(self, **seconds):
        self.seconds, self.tried = seconds, []

    def __call__(self, plan):
        resolved, config = plan.resolved, plan.resolved.config
        name = f"zero{config.zero.zero_optimization.stage}_micro{resolved.run.batch.micro}"
        self.tried.append(name)
        found = self.seconds.get(name, 0.5)
        if isinstance(found, str):
            failure = Failure(rank=1, host="here", time=time.time(), message=found)
            return Outcome(exit_code=1, first_failure=failure, num_failures=1)
        if found < 0:
            return Outcome(exit_code=130, was_stopped=True)
        folder = Path(config.logging.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "metrics.jsonl").open("w") as file:
            for iteration in range(1, config.training.train_iters + 1):
                rates = {"time/iteration": found if iteration > 1 else 100.0}
                rates |= {"throughput/tflops_per_device": 60 / rates["time/iteration"]}
                file.write(json.dumps({"iteration": iteration, **rates}) + "\n")
        return Outcome(exit_code=0)


def tune(minimal, runner, *overrides):
    request = Request(program="train", paths=(str(minimal),), overrides=overrides)
    return tune_trials(request, plan_launch(request), dry_run=None, run=runner)


ALL = ["zero1_micro2", "zero1_micro4", "zero0_micro2", "zero0_micro4"]


def test_every_trial_is_run_and_the_best_is_printed(minimal, capsys):
    runner = Runner(zero1_micro4=0.25)
    assert tune(minimal, runner) == 0
    assert sorted(runner.tried) == sorted(ALL)
    best = capsys.readouterr().out.splitlines()[3].split()
    # 4 samples on each of 2 devices in a quarter of a second.
    assert best == ["1", "4", "1", "0.25", "s", "32", "240"]


def test_earlier_results_are_reused_unless_overwrite_is_set(minimal):
    tune(minimal, Runner())
    again, over = Runner(), Runner()
    assert tune(minimal, again, "autotuning.metric=latency", "autotuning.tuner_type=random") == 0
    assert again.tried == []
    assert tune(minimal, over, "autotuning.overwrite=true") == 0
    assert len(over.tried) == 4


@pytest.mark.parametrize("change", ["hidden-size=32", "autotuning.end_profile_step=3", "num-gpus=3"])
def test_results_of_another_training_are_not_reused(minimal, change):
    tune(minimal, Runner())
    runner = Runner()
    tune(minimal, runner, change)
    assert len(runner.tried) == 4


def test_out_of_memory_is_reported_and_larger_micro_batches_are_left_out(minimal, capsys):
    failures = {"zero1_micro2": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"}
    runner = Runner(**failures)
    assert tune(minimal, runner) == 0
    assert sorted(runner.tried) == sorted(set(ALL) - {"zero1_micro4"})
    printed = capsys.readouterr()
    assert "torch.OutOfMemoryError: CUDA out" in printed.out
    assert "micro-batch 2 was" in printed.out
    assert "worker 1 on" in printed.err
    again = Runner()
    tune(minimal, again)
    assert again.tried == []


def test_if_all_trials_fail_the_command_fails_and_tries_them_again(minimal, capsys):
    runner = Runner(**dict.fromkeys(ALL, "the network is gone"))
    assert tune(minimal, runner) == 1
    assert "no trial succeeded" in capsys.readouterr().out
    again = Runner()
    assert tune(minimal, again) == 0
    assert len(again.tried) == 4


def test_a_stopped_search_continues_where_it_was(minimal, capsys):
    first = Runner(zero0_micro2=-1)
    assert tune(minimal, first) == 130
    assert "continue from autotuning_results/results.json" in capsys.readouterr().err
    second = Runner()
    assert tune(minimal, second) == 0
    done = first.tried[: first.tried.index("zero0_micro2")]
    assert sorted(done + second.tried) == sorted(ALL)


def test_ctrl_c_between_trials_is_a_request_to_stop(minimal):
    def interrupted(plan):
        raise KeyboardInterrupt

    assert tune(minimal, interrupted) == 130


def test_missing_times_are_an_error(minimal):
    with refused(LaunchError, "0", "3 iterations", code="too-few-times"):
        tune(minimal, lambda plan: Outcome(exit_code=0))


def test_mp_size_is_the_model_parallel_size_of_trials_and_of_the_answer(minimal, capsys):
    sizes = []

    def run(plan):
        sizes.append(plan.resolved.run.layout.tensor)
        return Runner()(plan)

    assert tune(minimal, run, "autotuning.mp_size=2") == 0
    assert set(sizes) == {2}
    assert "--set model-parallel-size=2" in capsys.readouterr().out


def test_a_trial_neither_saves_nor_reports(minimal):
    overrides = ["csv_monitor.enabled=true", "save=out", "load=out", "save-interval=5"]
    guards = ["on-spike=rollback", "spike-patience=2", "adlr-autoresume=true"]
    config = load_config([minimal], overrides=[*overrides, *guards])
    resolve(config, devices=1)
    experiment = Experiment(zero_stage=1, micro_batch=4, accumulation=1)
    trial = Path("trial.yml")
    trial.write_text(yaml.safe_dump(describe(config, experiment, log_dir=Path("folder"))))
    read = load_config([trial])
    resolve(read, devices=1)
    assert (read.training.on_spike, read.training.adlr_autoresume) == (None, False)
    assert (read.checkpoint.save, read.monitors.csv_monitor.enabled) == (None, False)
    assert (read.training.train_iters, read.training.eval_iters, read.logging.log_interval) == (4, 0, 1)
    assert read.lr_schedule.lr_decay_iters == config.training.train_iters
    assert (read.model, read.optimizer, read.data) == (config.model, config.optimizer, config.data)
    assert not read.autotuning.autotuning.enabled


def test_a_trial_downloads_the_base_of_adapters_to_the_given_folder(minimal):
    adapters = ["lora-rank=2", "lora-base=s3://bucket/model", "store-cache=folder/$$1"]
    config = load_config([minimal], overrides=adapters)
    experiment = Experiment(zero_stage=1, micro_batch=4, accumulation=1)
    trial = Path("trial.yml")
    trial.write_text(yaml.safe_dump(describe(config, experiment, log_dir=Path("folder"))))
    read = load_config([trial])
    assert (read.adapters.lora_base, read.checkpoint.store_cache) == ("s3://bucket/model", "folder/$1")


def test_the_removed_names_are_parameters():
    names = {parameter.name for parameter in all_parameters()}
    assert set(LEFT_OUT) <= names


def test_elasticity_is_refused(minimal):
    text = minimal.read_text().replace("train-micro-batch-size-per-gpu: 2\n", "")
    block = "elasticity: {enabled: true, max_train_batch_size: 100, micro_batch_sizes: [2], version: 0.1}\n"
    minimal.write_text(text + block)
    with refused(ConfigError, "micro-batch, which elasticity"):
        tune(minimal, Runner())


def test_a_limit_without_candidates_is_reported(minimal):
    with refused(ConfigError, "max_train_batch_size: 1", "2 copies"):
        tune(minimal, Runner(), "autotuning.max_train_batch_size=1")


@pytest.mark.usefixtures("can_train")
def test_a_dry_run_lists_the_trials_and_writes_nothing(minimal):
    before = sorted(Path().iterdir())
    text = CliRunner().invoke(main, ["--config", str(minimal), "--dry-run"], catch_exceptions=False)
    listed = CliRunner().invoke(main, ["--config", str(minimal), "--dry-run=json"], catch_exceptions=False)
    assert (text.exit_code, listed.exit_code) == (0, 0)
    assert text.stdout.splitlines()[0].split() == ["trial", "zero", "micro-batch", "accumulation"]
    experiments = json.loads(listed.stdout)["experiments"]
    names = [experiment["name"].replace("-", "_").removesuffix("_accumulate1") for experiment in experiments]
    assert sorted(names) == sorted(ALL)
    assert sorted(Path().iterdir()) == before


def test_a_dry_run_reports_that_trials_would_be_refused(minimal):
    words = ["--config", str(minimal), "--set", "data-path=nowhere", "--dry-run"]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == 2
    assert "would be refused" in result.stderr
    assert "nowhere.idx does not" in result.stderr


@pytest.mark.parametrize("program", ["generate", "evaluate", "doctor"])
def test_only_trainings_are_tuned(minimal, program):
    plan = plan_launch(Request(program=program, paths=(str(minimal),)))
    assert not is_tuned(plan)

"""Evaluations on texts and tasks during a run: the same on every layout, and without effect on it."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from support.corpus import write_corpus
from support.distributed import DistributedFailure, run_ranks
from support.harness_tasks import OFFLINE, write_tasks
from support.refusals import refused
from support.settings import resolved_from

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "num_layers": 3,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "pos_emb": "rotary",
    "make_vocab_size_divisible_by": 19,
    "tokenizer_type": "CharLevelTokenizer",
    "split": "80,10,10",
    "train_iters": 4,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.003}},
    "init_method_std": 0.02,
    "log_interval": 1,
    "eval_interval": 2,
    "eval_iters": 1,
    "char_level_ppl": True,
}
TWO = {"train_micro_batch_size_per_gpu": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 3": {"zero_optimization": {"stage": 3}} | TWO,
    "tensor and sequence parallel": {"model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipe_parallel_size": 2},
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "precision": "bfloat16"}
# Texts of more than one window and of other characters, and one without any.
TEXTS = ["abcdefgh" * 9, "", "é 你好", *("fghijk" * (1 + number % 7) for number in range(33))]


def train(folder: str, name: str, settings: dict[str, Any]) -> None:
    from neox_model.parallel.topology import create_groups
    from neox_model.train.open_run import train_in

    settings = SETTINGS | settings | {"data_path": f"{folder}/corpus", "log_dir": f"{folder}/{name}"}
    resolved = resolved_from(settings, devices=int(os.environ["WORLD_SIZE"]))
    groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
    train_in(groups, resolved)


def train_all(folder: str, runs: dict[str, dict[str, Any]]) -> None:
    for name, settings in runs.items():
        with signal_during_evaluation() if name == "signalled" else nullcontext():
            train(folder, name, settings)


@contextmanager
def signal_during_evaluation() -> Iterator[None]:
    """Send SIGTERM to rank 1 alone in its first batch of texts."""
    from neox_model.scoring.scorer import Scorer

    score, batches = Scorer._score, []

    def interrupted(scorer: Scorer, *arguments: Any) -> Any:
        batches.append(1)
        if len(batches) == 1 and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGTERM)
        return score(scorer, *arguments)

    Scorer._score = interrupted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Scorer._score = score  # type: ignore[method-assign]
    assert len(batches) == 1, "the evaluation ends before its second batch"


def evaluate_checkpoints(folder: str, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Iteration and metrics of the latest checkpoint in each folder, from `neox-launch evaluate`."""
    from neox_model.evaluate.run import evaluate_in
    from neox_model.parallel.topology import create_groups
    from neox_model.scoring.results import Results

    found = {}
    for name, settings in runs.items():
        load = f"{folder}/{name}"
        texts = {"eval_data": f"{folder}/texts.jsonl", "eval_results_prefix": f"{folder}/later/run"}
        resolved = resolved_from(
            SETTINGS | settings | texts | {"load": load, "data_path": f"{folder}/corpus"}
        )
        results = evaluate_in(create_groups(1, 1), resolved)
        assert isinstance(results, Results)
        found[name] = [results.iteration, results.metrics()]
    return found


def record(folder: Path) -> dict[int, dict[str, float]]:
    """Iteration -> metrics."""
    found: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "event" not in values:
            found.setdefault(values["iteration"], {}).update(values)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    write_corpus(folder)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    texts = {"eval_data": str(folder / "texts.jsonl"), "eval_results_prefix": str(folder / "files" / "run")}
    one = {
        "one": texts | {"save": str(folder / "saved"), "save_interval": 4},
        "dropout": DROPOUT,
        "dropout, evaluated": DROPOUT | texts | {"save": str(folder / "saved in 16 bit"), "save_interval": 4},
    }
    run_ranks(train_all, size=1, folder=str(folder), runs=one)
    two = {name: layout | texts for name, layout in LAYOUTS.items()}
    again = LAYOUTS["pipeline"] | {"eval_data": texts["eval_data"], "train_iters": 6, "eval_interval": 3}
    stopped = str(folder / "stopped")
    two["uninterrupted"] = again
    two["signalled"] = again | {"save": stopped, "save_interval": 100}
    two["resumed"] = again | {"load": stopped}
    run_ranks(train_all, size=2, folder=str(folder), runs=two)
    return folder


NAMES = ("eval_data/loss", "eval_data/bits_per_byte", "eval_data/perplexity_per_character")


def test_texts_are_evaluated_at_the_interval_and_at_the_end(folder):
    found = record(folder / "one")
    assert [iteration for iteration, values in found.items() if NAMES[0] in values] == [2, 4]
    assert found[4][NAMES[0]] < found[2][NAMES[0]] < 6.5
    files = sorted((folder / "files").iterdir())
    assert len(files) == 2 * (2 + len(LAYOUTS))
    contents = [json.loads(path.read_text()) for path in files]
    assert {one["iteration"] for one in contents} == {2, 4}
    assert all(one["perplexity"]["documents"] == len(TEXTS) - 1 for one in contents)
    assert all(one["packages"]["torch"] for one in contents)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_the_results_of_one_process(folder, layout):
    found, expected = record(folder / layout), record(folder / "one")
    for iteration in (2, 4):
        for name in (*NAMES, "loss/validation", "perplexity_per_character/validation"):
            assert found[iteration][name] == pytest.approx(expected[iteration][name], rel=1e-5), name


def test_a_checkpoint_has_the_results_of_the_training(folder):
    runs = {"saved": ("one", {}), "saved in 16 bit": ("dropout, evaluated", DROPOUT)}
    (found,) = run_ranks(
        evaluate_checkpoints,
        size=1,
        folder=str(folder),
        runs={name: settings for name, (_, settings) in runs.items()},
    )
    for name, (training, _) in runs.items():
        iteration, metrics = found[name]
        last = record(folder / training)[4]
        assert (iteration, metrics) == (4, {name: last[name] for name in metrics})
        assert len(metrics) == 4


def test_a_signal_ends_the_evaluation_on_all_ranks_and_the_training_is_saved(folder):
    found = record(folder / "signalled")
    assert not any(NAMES[0] in values for values in found.values())
    assert max(found) == 3
    assert (folder / "stopped" / "latest").read_text().strip() == "global_step3"


def test_a_resumed_training_begins_with_the_evaluation_that_a_signal_ended(folder):
    found, expected = record(folder / "resumed"), record(folder / "uninterrupted")
    assert sorted(found) == [3, 4, 5, 6]
    for iteration in (3, 6):
        for name in (*NAMES, "loss/validation"):
            assert found[iteration][name] == expected[iteration][name], name


def test_evaluations_change_nothing_in_the_training(folder):
    plain, evaluated = record(folder / "dropout"), record(folder / "dropout, evaluated")
    for iteration in range(1, 5):
        assert evaluated[iteration]["loss/train"] == plain[iteration]["loss/train"]
    assert plain[4]["loss/validation"] == evaluated[4]["loss/validation"]


def test_a_checkpoint_is_saved_before_an_evaluation_that_may_fail(folder, tmp_path):
    runs = {
        "failed": {"eval_data": f"{tmp_path}/absent.jsonl", "save": f"{tmp_path}/saved", "save_interval": 2}
    }
    with refused(DistributedFailure, "absent"):
        run_ranks(train_all, size=1, folder=str(folder), runs=runs)
    assert (tmp_path / "saved" / "latest").read_text().strip() == "global_step2"


def test_the_perplexity_per_character_is_that_of_the_tokens(folder):
    """With one token per character, they are equal."""
    for values in record(folder / "one").values():
        if "loss/validation" in values:
            assert values["perplexity_per_character/validation"] == pytest.approx(
                values["perplexity/validation"], rel=1e-9
            )


def test_tasks_are_evaluated_in_a_pipeline_as_on_one_process(folder, tmp_path):
    pytest.importorskip("lm_eval")
    tasks = {
        "eval_tasks": ["local_choices_fewshot", "local_answers", "local_stories"],
        "eval_include_path": str(write_tasks(tmp_path / "tasks")),
        "eval_limit": 3,
        "seq_length": 128,
        "max_position_embeddings": 128,
    }
    environment = {**OFFLINE, "HF_HOME": str(tmp_path / "cache")}
    for size, runs in ((1, {"tasks": tasks}), (2, {"tasks in a pipeline": tasks | LAYOUTS["pipeline"]})):
        run_ranks(
            train_all,
            size=size,
            folder=str(folder),
            runs=runs,
            environment=environment,
            timeout_seconds=900,
        )
    found, expected = record(folder / "tasks in a pipeline"), record(folder / "tasks")
    for iteration in (2, 4):
        names = [name for name in expected[iteration] if name.startswith("task/")]
        assert {"task/local_choices_fewshot/acc", "task/local_answers/exact_match"} < {*names}
        for name in names:
            assert found[iteration][name] == pytest.approx(expected[iteration][name], rel=1e-5), name
    assert found[4]["task/local_stories/bits_per_byte"] < found[2]["task/local_stories/bits_per_byte"]

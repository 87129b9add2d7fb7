"""Tasks of the evaluation harness: our numbers are those of its Hugging Face backend, on every layout."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.distributed import run_ranks
from support.harness_tasks import MODEL, OFFLINE, TASKS, write_tasks
from support.hf_models import write_model
from support.launches import launch

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow

PAIRS = [
    ("", "return"),
    ("def f(", "x):"),
    ("import random ", " settings"),
    ("a " * 120, "model layer"),
    ("for value in", " folder:\n    return None" * 3),
    ("<|endoftext|>", "été 你好"),
]
STORIES = ["", "x", "def write_model(folder): " * 20]
WORDS = [f"{first} {second}" for first in ("def", "x", "return") for second in ("a", "b", "(", "model", "1")]
PROMPTS = ["def", "import random\n" * 20, "return the tokenizer for", "x" * 5]


def run_backend(exported, tasks, dtype="float32"):
    """Results of the harness's own backend, in this process."""
    from lm_eval.api.instance import Instance
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(exported, device="cpu", dtype=dtype, batch_size=4, softmax_dtype="float32")
    found = simple_evaluate(
        model, tasks=list(TASKS), task_manager=TaskManager(include_path=tasks), log_samples=False
    )
    return {"tasks": plain(found["results"]), **direct(model, Instance)}


def run_ours(load, tasks, settings=()):
    """Results of our model, on each rank; None where there are no results of tasks."""
    import torch.distributed as dist
    from lm_eval.api.instance import Instance

    from neox_config import load_config, resolve
    from neox_model.generate.run import load_forward
    from neox_model.parallel.topology import create_groups
    from neox_model.processes import load_tokenizer
    from neox_model.scoring.evaluation import TextEvaluation
    from neox_model.scoring.scorer import Scorer

    overrides = [f"eval-tasks=[{', '.join(TASKS)}]", f"eval-include-path={tasks}", *settings]
    config = load_config([Path(load, "model.yml")], overrides=overrides)
    resolved = resolve(config, devices=dist.get_world_size())
    groups = create_groups(resolved.derived.model_parallel_size, resolved.derived.pipe_parallel_size)
    tokenizer = load_tokenizer(config)
    evaluation = TextEvaluation(resolved, tokenizer, groups)
    forward = load_forward(resolved, load, groups, tokenizer)
    found = [evaluation.run(lambda: forward, iteration=0) for _ in range(2)]
    scorer = Scorer(forward, vocab_size=MODEL["vocab_size"], seq_length=96, batch_tokens=200)
    model = evaluation._model(evaluation._harness, forward, scorer)
    results = {"tasks": None, **direct(model, Instance)}
    if found[0] is not None:
        assert plain(found[0].tasks["results"]) == plain(found[1].tasks["results"]), "runs are repeatable"
        counts = {name: n["effective"] for name, n in found[0].tasks["n-samples"].items()}
        results |= {"tasks": plain(found[0].tasks["results"]), "counts": counts, "text": str(found[0])}
        results["metrics"] = found[0].metrics()
    return results


def direct(model, instance):
    """Requests of every kind, without tasks."""

    def ask(kind, arguments):
        return getattr(model, kind)(
            [instance(kind, {}, arguments=one, idx=0, doc_id=number) for number, one in enumerate(arguments)]
        )

    settings = {"until": ["t"], "max_gen_toks": 12, "do_sample": False}
    one = {"until": [], "max_gen_toks": 1, "do_sample": False}
    texts = ask("generate_until", [(prompt, dict(one)) for prompt in WORDS])
    # Some tokens are no whole characters.
    likely = [pair for pair in zip(WORDS, texts, strict=True) if pair[1] and pair[1].isascii()]
    return {
        "pairs": [list(pair) for pair in ask("loglikelihood", [*PAIRS, *likely])],
        "stories": ask("loglikelihood_rolling", [(story,) for story in STORIES]),
        "texts": ask("generate_until", [(prompt, dict(settings)) for prompt in PROMPTS]),
    }


def plain(results):
    return {
        task: {key: value for key, value in values.items() if isinstance(value, int | float)}
        for task, values in results.items()
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    convert = [sys.executable, "-P", "-m", "neox_model.convert"]
    write_model(folder / "theirs", "llama", MODEL)
    for arguments in (
        ["from-hf", "theirs", "--output", "imported"],
        ["to-hf", "--load", "imported", "--output", "exported"],
    ):
        subprocess.run([*convert, *arguments], cwd=folder, check=True, timeout=300)
    environment = {**OFFLINE, "HF_HOME": str(folder / "cache")}
    return SimpleNamespace(
        folder=folder,
        imported=str(folder / "imported"),
        exported=str(folder / "exported"),
        tasks=str(write_tasks(folder / "local")),
        environment=environment,
    )


def ours(files, *settings, size=1):
    found = run_ranks(
        run_ours,
        size=size,
        timeout_seconds=900,
        environment=files.environment,
        load=files.imported,
        tasks=files.tasks,
        settings=settings,
    )
    assert all(one["pairs"] == found[0]["pairs"] for one in found), "ranks agree"
    return found[0]


@pytest.fixture(scope="module")
def alone(files):
    return ours(files)


@pytest.fixture(scope="module")
def backend(files):
    return run_ranks(
        run_backend,
        size=1,
        timeout_seconds=900,
        environment=files.environment,
        exported=files.exported,
        tasks=files.tasks,
    )[0]


def assert_equal(found, expected, tolerance=1e-5):
    for (value, is_greedy), (wanted, was_greedy) in zip(found["pairs"], expected["pairs"], strict=True):
        assert value == pytest.approx(wanted, rel=tolerance, abs=tolerance)
        assert is_greedy == was_greedy
    assert found["stories"] == pytest.approx(expected["stories"], rel=tolerance, abs=tolerance)
    assert found["texts"] == expected["texts"]
    assert found["tasks"].keys() == expected["tasks"].keys() == set(TASKS)
    for task, values in expected["tasks"].items():
        for key, value in values.items():
            exact = key.startswith(("acc", "exact_match"))
            wanted = value if exact else pytest.approx(value, rel=tolerance)
            if "stderr" not in key:
                assert found["tasks"][task][key] == wanted, (task, key)


def test_the_harness_gives_the_numbers_of_its_hugging_face_backend(alone, backend):
    assert_equal(alone, backend)
    assert any(text for text in alone["texts"])
    assert {is_greedy for _, is_greedy in alone["pairs"]} == {True, False}
    assert alone["stories"][0] == 0
    assert alone["counts"] == dict(zip(TASKS, (17, 17, 15, 8, 11), strict=True))
    assert 0 < alone["tasks"]["local_choices"]["acc,none"] < 1
    assert alone["metrics"]["task/local_choices/acc"] == alone["tasks"]["local_choices"]["acc,none"]
    assert "local_stories" in alone["text"]


def test_the_command_evaluates_tasks_and_texts_and_writes_a_file(files, alone, monkeypatch):
    for name, value in files.environment.items():
        monkeypatch.setenv(name, value)
    (files.folder / "texts.txt").write_text("def write_model(folder): " * 20)
    arguments = (
        "--config",
        "imported/model.yml",
        "--tasks",
        "local_choices,local_answers",
        "--data",
        "texts.txt",
    )
    prefix = ("--set", "eval-results-prefix=results/run")
    done = launch(files.folder, "evaluate", *arguments, "--include-path", files.tasks, *prefix, seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "local_answers" in done.stdout
    assert "bits_per_byte" in done.stdout
    (path,) = (files.folder / "results").iterdir()
    found = json.loads(path.read_text())
    for task in ("local_choices", "local_answers"):
        assert plain(found["results"])[task] == alone["tasks"][task]
    # The third of the stories.
    expected = -alone["stories"][2] / found["perplexity"]["tokens"]
    assert found["perplexity"]["loss"]["value"] == pytest.approx(expected, rel=1e-5)
    assert found["checkpoint"] == str(files.folder / "imported")


@pytest.mark.parametrize(
    ("settings", "size"),
    [(("model-parallel-size=2",), 2), ((), 2), (("pipe-parallel-size=2",), 2)],
    ids=["tensor parallel", "data parallel", "pipeline"],
)
def test_layouts_give_the_numbers_of_one_process(files, alone, settings, size):
    assert_equal(ours(files, *settings, size=size), alone)


HELPERS = """
import evaluate


def fails(doc, results):
    return {"acc": doc["there is no such key"]}


def downloads(doc, results):
    return {"acc": evaluate.load("rouge")}
"""
# Task -> lines of its YAML.
FAULTS = {
    "damaged_data": "doc_to_text: a",
    "no_function": "doc_to_text: !function helpers.absent",
    "unknown_metric": "doc_to_text: a\nmetric_list: [{metric: bleurt}]",
    "fails": "doc_to_text: a\nprocess_results: !function helpers.fails",
    "downloads": "doc_to_text: a\nprocess_results: !function helpers.downloads",
}


def messages_of_faults(folder):
    """Error of each task, while it is loaded or run, and which tasks are known for which names."""
    from lm_eval.models.dummy import DummyLM

    from neox_config.errors import NeoXError
    from neox_model.scoring.harness import Tasks, _manager_of

    found = {}
    for name in FAULTS:
        try:
            Tasks([name], include_path=folder, num_fewshot=None, limit=None).run(DummyLM())
        except NeoXError as error:
            found[name] = str(error)
    found["known"] = ["piqa" in _manager_of([name], folder).all_tasks for name in ("fails", "mine")]
    return found


def test_faults_of_tasks_are_errors_that_name_the_task(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "helpers.py").write_text(HELPERS)
    (folder / "mine.yaml").write_text("group: mine\ntask: [fails, piqa]\n")
    for name, lines in FAULTS.items():
        data = folder / f"{name}.jsonl"
        data.write_text('{"text": "a"}\n' + ("{" if name == "damaged_data" else ""))
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
            f"test_split: test\noutput_type: loglikelihood\ndoc_to_target: b\n{lines}\n"
        )
    environment = {**OFFLINE, "HF_HOME": str(tmp_path / "cache")}
    (found,) = run_ranks(messages_of_faults, size=1, environment=environment, folder=str(folder))
    # A group may contain tasks of the harness.
    assert found.pop("known") == [False, True]
    assert found.keys() == FAULTS.keys()
    for name in ("unknown_metric", "downloads"):
        assert "is not part of lm_eval and would be downloaded" in found[name]
    assert found["damaged_data"].startswith(
        "eval-tasks: damaged_data cannot be loaded: DatasetGenerationError"
    )
    assert found["no_function"].startswith("eval-tasks: no_function cannot be loaded: ")
    assert found["fails"].startswith("eval-tasks: fails cannot be run: KeyError: 'there is no such key' (")
    assert "helpers.py:6)" in found["fails"]


def test_16_bit_gives_the_numbers_of_the_backend_up_to_rounding(files):
    found = ours(files, "precision=bf16")
    expected = run_ranks(
        run_backend,
        size=1,
        timeout_seconds=900,
        environment=files.environment,
        exported=files.exported,
        tasks=files.tasks,
        dtype="bfloat16",
    )[0]
    for (value, _), (wanted, _) in zip(found["pairs"], expected["pairs"], strict=True):
        assert value == pytest.approx(wanted, rel=0.02, abs=0.1)
    for task, name in (("local_stories", "bits_per_byte,none"), ("local_cloze", "perplexity,none")):
        assert found["tasks"][task][name] == pytest.approx(expected["tasks"][task][name], rel=0.05)

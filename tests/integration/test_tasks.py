"""Tasks of the harness: our numbers, and those of our server, are those of its Hugging Face backend."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, processors

from support.distributed import run_ranks
from support.harness_tasks import MODEL, OFFLINE, TASKS, write_tasks
from support.hf_models import write_model
from support.launches import launch
from support.served import serving

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


# Name -> settings.
ALONE = {"one process": (), "bf16": ("precision=bf16",)}
LAYOUTS = {
    "tensor parallel": ("model-parallel-size=2",),
    "data parallel": (),
    "pipeline": ("pipe-parallel-size=2",),
}
# The client shortens inputs that it scores to two tokens less than `max_length`, because it always requests a
# new token, and texts that it generates to one token less.
ROOM_TO_SCORE, ROOM_TO_GENERATE = 2, 1


def run_backends(exported, tasks, url, length):
    """Results of the harness's own backend, and of its client of a server, in this process."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    found = {dtype: run_backend(exported, tasks, dtype) for dtype in ("float32", "bfloat16")}

    def client(room):
        return LocalCompletionsAPI(
            base_url=url,
            model="imported",
            tokenizer=exported,
            tokenizer_backend="huggingface",
            batch_size=16,
            max_length=length + room,
            max_retries=1,
        )

    found["client"] = run_harness(client(ROOM_TO_SCORE), tasks, writer=client(ROOM_TO_GENERATE))
    return found


def run_backend(exported, tasks, dtype):
    from lm_eval.models.huggingface import HFLM

    model = HFLM(exported, device="cpu", dtype=dtype, batch_size=4, softmax_dtype="float32")
    return run_harness(model, tasks)


def run_harness(model, tasks, writer=None):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=tasks, include_defaults=False)
    found = simple_evaluate(model, tasks=list(TASKS), task_manager=manager, log_samples=False)
    return {"tasks": plain(found["results"]), **direct(model, writer or model)}


def run_ours(load, tasks, layouts):
    """Results of our model by layout, on each rank; None where there are no results of tasks."""
    import torch.distributed as dist

    from neox_config import load_config, resolve
    from neox_model.generate.modes import Job
    from neox_model.generate.run import load_forward
    from neox_model.parallel.topology import create_groups
    from neox_model.processes import load_tokenizer
    from neox_model.scoring import harness
    from neox_model.scoring.evaluation import TextEvaluation
    from neox_model.scoring.scorer import Scorer

    results = {}
    for name, settings in layouts.items():
        overrides = [f"eval-tasks=[{', '.join(TASKS)}]", f"eval-include-path={tasks}", *settings]
        config = load_config([Path(load, "model.yml")], overrides=overrides)
        resolved = resolve(config, devices=dist.get_world_size())
        groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
        tokenizer = load_tokenizer(config.tokenizer)
        evaluation = TextEvaluation(
            config.generation,
            resolved.run.batch,
            tokenizer,
            groups,
            seed=config.training.seed,
            configuration={},
        )
        forward, _ = load_forward(resolved, load, groups, tokenizer)
        found = [evaluation.run(lambda: forward, iteration=0) for _ in range(2 if settings == () else 1)]  # noqa: B023
        scorer = Scorer(forward, seq_length=96, batch_tokens=200)
        job = Job(
            config.generation,
            forward,
            tokenizer,
            groups,
            seed=config.training.seed,
            seq_length=resolved.run.batch.length,
        )
        model = harness.HarnessModel(scorer, job)
        results[name] = {"tasks": None, **direct(model, model)}
        if found[0] is not None:
            first, second = (plain(one.tasks["results"]) for one in (found[0], found[-1]))
            assert first == second, "runs are repeatable"
            counts = {task: n["effective"] for task, n in found[0].tasks["n-samples"].items()}
            results[name] |= {"tasks": first, "counts": counts}
            results[name] |= {"text": str(found[0]), "metrics": found[0].metrics()}
    return results


def direct(model, writer):
    """Requests of every kind, without tasks; texts are generated by `writer`."""
    from lm_eval.api.instance import Instance

    def ask(kind, arguments):
        return getattr(writer if kind == "generate_until" else model, kind)(
            [Instance(kind, {}, arguments=one, idx=0, doc_id=number) for number, one in enumerate(arguments)]
        )

    settings = {"until": ["t"], "max_gen_toks": 12, "do_sample": False}
    one = {"until": [], "max_gen_toks": 1, "do_sample": False}
    texts = ask("generate_until", [(prompt, dict(one)) for prompt in WORDS])
    # Some tokens are no whole characters.
    likely = [pair for pair in zip(WORDS, texts, strict=True) if pair[1] and pair[1].isascii()]
    return {
        "pairs": [list(pair) for pair in ask("loglikelihood", PAIRS)],
        "likely": [[pair, score] for pair, score in zip(likely, ask("loglikelihood", likely), strict=True)],
        "stories": ask("loglikelihood_rolling", [(story,) for story in STORIES]),
        "texts": ask("generate_until", [(prompt, dict(settings)) for prompt in PROMPTS]),
    }


def plain(results):
    return {
        task: {key: value for key, value in values.items() if isinstance(value, int | float)}
        for task, values in results.items()
    }


def converted(folder, family, settings):
    """Write a model of transformers, its import and its export, and the tasks."""
    convert = [sys.executable, "-P", "-m", "neox_model.convert"]
    write_model(folder / "theirs", family, settings)
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


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return converted(tmp_path_factory.mktemp("tasks"), "llama", MODEL)


def ours(files, layouts, size):
    found = run_ranks(
        run_ours,
        size=size,
        timeout_seconds=900,
        environment=files.environment,
        load=files.imported,
        tasks=files.tasks,
        layouts=layouts,
    )
    for name in layouts:
        assert all(one[name]["pairs"] == found[0][name]["pairs"] for one in found), "ranks agree"
    return found[0]


@pytest.fixture(scope="module")
def alone(files):
    return ours(files, ALONE, 1)


@pytest.fixture(scope="module")
def parallel(files):
    return ours(files, LAYOUTS, 2)


@pytest.fixture(scope="module")
def backends(files):
    length = MODEL["max_position_embeddings"]
    settings = {"seq-length": length + ROOM_TO_SCORE, "max-position-embeddings": length + ROOM_TO_SCORE}
    arguments = [part for item in settings.items() for part in ("--set", "{}={}".format(*item))]
    with serving(files.folder, *arguments, config=("imported/model.yml",)) as server:
        return run_ranks(
            run_backends,
            size=1,
            timeout_seconds=900,
            environment=files.environment,
            exported=files.exported,
            tasks=files.tasks,
            url=f"http://127.0.0.1:{server.port}/v1/completions",
            length=length,
        )[0]


def assert_equal(found, expected, tolerance=1e-5):
    # The backend generates ids that are no tokens, too; their text is empty.
    likely = [{tuple(pair): score for pair, score in one["likely"]} for one in (found, expected)]
    pairs = [(likely[0][pair], score) for pair, score in likely[1].items()]
    assert len(pairs) >= 4
    for (value, is_greedy), (wanted, was_greedy) in [
        *pairs,
        *zip(found["pairs"], expected["pairs"], strict=True),
    ]:
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


def test_the_harness_gives_the_numbers_of_its_hugging_face_backend(alone, backends):
    found = alone["one process"]
    assert_equal(found, backends["float32"])
    assert any(text for text in found["texts"])
    assert {is_greedy for *_, is_greedy in found["pairs"]} == {False}
    assert {is_greedy for _, (_, is_greedy) in found["likely"]} == {True}
    assert found["stories"][0] == 0
    assert found["counts"] == dict(zip(TASKS, (17, 17, 15, 8, 11), strict=True))
    assert 0 < found["tasks"]["local_choices"]["acc,none"] < 1
    assert found["metrics"]["task/local_choices/acc"] == found["tasks"]["local_choices"]["acc,none"]
    assert "local_stories" in found["text"]


def test_the_harness_gives_experts_the_numbers_of_its_hugging_face_backend(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
    files = converted(tmp_path, "qwen3_moe", MODEL | experts)
    (expected,) = run_ranks(
        run_backend,
        size=1,
        timeout_seconds=900,
        environment=files.environment,
        exported=files.exported,
        tasks=files.tasks,
        dtype="float32",
    )
    assert_equal(ours(files, {"one process": ()}, 1)["one process"], expected)
    assert any(expected["texts"])


def test_the_harness_gives_the_same_numbers_as_the_client_of_a_server(alone, backends):
    assert_equal(backends["client"], backends["float32"])
    assert_equal(backends["client"], alone["one process"])


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
        assert plain(found["results"])[task] == alone["one process"]["tasks"][task]
    # The third of the stories.
    expected = -alone["one process"]["stories"][2] / found["perplexity"]["tokens"]
    assert found["perplexity"]["loss"]["value"] == pytest.approx(expected, rel=1e-5)
    assert found["checkpoint"] == str(files.folder / "imported")


TEXTS = ["def write_model(folder):", "x", "été 你好", "import random\nreturn None"]


def scored_elsewhere(exported, url, length):
    """Log-likelihoods of texts and of a pair: by hand, and by the harness with its backend and its client."""
    import torch
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from transformers import AutoModelForCausalLM, AutoTokenizer

    library = AutoTokenizer.from_pretrained(exported)
    reference = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64).eval()

    def by_hand(context, continuation):
        ids = [*context, *continuation]
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = range(len(context), len(ids))
        return sum(float(logits[place - 1, ids[place]]) for place in places)

    def plain(text):
        return library.encode(text, add_special_tokens=False)

    bos, (context, continuation) = [library.bos_token_id], PAIRS[1]
    pair = plain(context), plain(context + continuation)[len(plain(context)) :]
    found = {
        "one BOS": ([by_hand(bos, plain(text)) for text in TEXTS], by_hand([*bos, *pair[0]], pair[1])),
        "two": ([by_hand(bos, bos + plain(text)) for text in TEXTS], None),
        "none": ([], by_hand(*pair)),
    }
    client = {
        "base_url": url,
        "model": "imported",
        "tokenizer": exported,
        "tokenizer_backend": "huggingface",
        "batch_size": 16,
        "max_length": length,
        "max_retries": 1,
    }
    models = {
        "backend": HFLM(exported, device="cpu", dtype="float32", batch_size=4, softmax_dtype="float32"),
        "client": LocalCompletionsAPI(**client),
        "client, add_bos_token": LocalCompletionsAPI(**client, add_bos_token=True),
    }
    for name, model in models.items():
        rolling = [Instance("loglikelihood_rolling", {}, arguments=(text,), idx=0) for text in TEXTS]
        of_pair = [Instance("loglikelihood", {}, arguments=PAIRS[1], idx=0)]
        found[name] = (model.loglikelihood_rolling(rolling), model.loglikelihood(of_pair)[0][0])
    return found


def begin_texts(folder):
    """Let the tokenizer of a model of transformers add BOS to each text."""
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(["<s>"])
    added = [("<s>", library.token_to_id("<s>"))]
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=added)
    library.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_bos_is_scored_by_rolling_tasks_as_elsewhere_and_not_in_texts(tmp_path, monkeypatch):
    begin_texts(write_model(tmp_path / "theirs", "llama", MODEL))
    convert = [sys.executable, "-P", "-m", "neox_model.convert"]
    arguments = ["from-hf", "theirs", "--output", "imported"]
    subprocess.run([*convert, *arguments], cwd=tmp_path, check=True, timeout=300)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tasks = tmp_path / "local"
    tasks.mkdir()
    task = {
        "task": "stories",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "texts.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (tasks / "stories.yaml").write_text(json.dumps(task))
    environment = {**OFFLINE, "HF_HOME": str(tmp_path / "cache")}
    with serving(tmp_path, config=("imported/model.yml",)) as server:
        (found,) = run_ranks(
            scored_elsewhere,
            size=1,
            timeout_seconds=600,
            environment=environment,
            exported=str(tmp_path / "theirs"),
            url=f"http://127.0.0.1:{server.port}/v1/completions",
            length=MODEL["max_position_embeddings"],
        )
    (once, begun), (twice, _), (_, bare) = (found[name] for name in ("one BOS", "two", "none"))
    expected = {"backend": (twice, begun), "client": (once, bare), "client, add_bos_token": (twice, begun)}
    for name, (rolling, of_pair) in expected.items():
        assert found[name][0] == pytest.approx(rolling, rel=1e-5), name
        assert found[name][1] == pytest.approx(of_pair, rel=1e-5), name
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    evaluated = ("--tasks", "stories", "--include-path", str(tasks), "--data", "texts.jsonl")
    options = ("--config", "imported/model.yml", "--set", "eval-results-prefix=results/run")
    done = launch(tmp_path, "evaluate", *options, *evaluated, seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "results").iterdir()
    results = json.loads(path.read_text())
    bits = -1 / math.log(2) / sum(len(text.encode()) for text in TEXTS)
    assert results["perplexity"]["bits_per_byte"]["value"] == pytest.approx(sum(once) * bits, rel=1e-5)
    assert results["results"]["stories"]["bits_per_byte,none"] == pytest.approx(sum(twice) * bits, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_the_numbers_of_one_process(alone, parallel, layout):
    assert_equal(parallel[layout], alone["one process"])


HELPERS = """
import evaluate


def fails(doc, results):
    return {"acc": doc["there is no such key"]}


def fails_as_torch_does(doc, results):
    raise RuntimeError("the metric has no table")


def downloads(doc, results):
    return {"acc": evaluate.load("rouge")}
"""
# Task -> lines of its YAML.
FAULTS = {
    "damaged_data": "doc_to_text: a",
    "no_function": "doc_to_text: !function helpers.absent",
    "unknown_metric": "doc_to_text: a\nmetric_list: [{metric: bleurt}]",
    "fails": "doc_to_text: a\nprocess_results: !function helpers.fails",
    "fails_as_torch": "doc_to_text: a\nprocess_results: !function helpers.fails_as_torch_does",
    "downloads": "doc_to_text: a\nprocess_results: !function helpers.downloads",
}


def messages_of_faults(folder):
    """Error of each task, while it is loaded or run."""
    from lm_eval.models.dummy import DummyLM
    from lm_eval.tasks import TaskManager

    from neox_config.errors import NeoXError
    from neox_model.scoring.harness import Tasks, _named

    found = {}
    for name in FAULTS:
        try:
            Tasks([name], include_path=folder, num_fewshot=None, limit=None).run(DummyLM())
        except NeoXError as error:
            found[name] = str(error)
    every = TaskManager(include_path=folder)
    # The pattern is for tasks, not for the tag `many_c`.
    found["matched"] = _named(["m*y_?", "fails", "many_b"], every, folder)
    try:
        _named(["unreadable"], every, folder)
    except NeoXError as error:
        found["unreadable"] = str(error)
    return found


def test_faults_of_tasks_are_errors_that_name_the_task(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "helpers.py").write_text(HELPERS)
    (folder / "mine.yaml").write_text("group: mine\ntask: [fails, piqa]\n")
    (folder / "unreadable.yaml").write_text("task: unreadable\ndoc_to_text: {{text}\n")
    for name in ("many_a", "many_b"):
        (folder / f"{name}.yaml").write_text(f"task: {name}\ntag: many_c\n")
    for name, lines in FAULTS.items():
        data = folder / f"{name}.jsonl"
        data.write_text('{"text": "a"}\n' + ("{" if name == "damaged_data" else ""))
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
            f"test_split: test\noutput_type: loglikelihood\ndoc_to_target: b\n{lines}\n"
        )
    environment = {**OFFLINE, "HF_HOME": str(tmp_path / "cache")}
    (found,) = run_ranks(messages_of_faults, size=1, environment=environment, folder=str(folder))
    assert found.pop("matched") == ["many_a", "many_b", "fails"]
    message = f"there is no task 'unreadable' in lm_eval and the valid YAML files (.yaml) of {folder}; "
    assert message in found.pop("unreadable")
    assert found.keys() == FAULTS.keys()
    for name in ("unknown_metric", "downloads"):
        assert "lm_eval and would" in found[name]
    assert found["damaged_data"].startswith(
        "eval-tasks: damaged_data cannot be loaded: DatasetGenerationError"
    )
    assert found["no_function"].startswith("eval-tasks: no_function cannot be loaded: ")
    assert found["fails"].startswith("eval-tasks: fails cannot be run: KeyError: 'there is no such key' (")
    assert "helpers.py:6)" in found["fails"]
    assert found["fails_as_torch"].startswith(
        "eval-tasks: fails_as_torch cannot be run: RuntimeError: the metric has no table ("
    )


def test_16_bit_gives_the_numbers_of_the_backend_up_to_rounding(alone, backends):
    found, expected = alone["bf16"], backends["bfloat16"]
    pairs = zip(found["pairs"], expected["pairs"], strict=True)
    for (value, _), (wanted, _) in pairs:
        assert value == pytest.approx(wanted, rel=0.02, abs=0.1)
    for task, name in (("local_stories", "bits_per_byte,none"), ("local_cloze", "perplexity,none")):
        assert found["tasks"][task][name] == pytest.approx(expected["tasks"][task][name], rel=0.05)

"""Preflight checks of the files that a configuration names."""

import json
import shutil
import struct
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from neox_config import resolve
from neox_config.derive.learning_rate import learning_rate_curve
from neox_config.problems import DEFAULTS, Place
from neox_config.spec.resume import IN_EFFECT, flat_values, in_effect
from neox_launcher.plan.notes import notes_on_load, notes_on_save
from neox_launcher.plan.preflight import check_files, check_loaded, preflight
from neox_launcher.resources.host import Host
from neox_launcher.resources.world import World
from support.refusals import shows


@pytest.fixture
def files(minimal, tmp_path, monkeypatch):
    """Create a dataset of one document of four tokens, a tokenizer of 20 entries, and `minimal.yml`."""
    monkeypatch.chdir(tmp_path)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1, 1)
    (tmp_path / "data.idx").write_bytes(header + struct.pack("<iqq", 4, 0, 0))
    (tmp_path / "data.bin").write_bytes(bytes(8))
    words = {str(number): number for number in range(20)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    return tmp_path


SETTINGS = "data-path: data\nvocab-file: tokenizer.json\ntokenizer-type: HFTokenizer\n"
HERE = "check the path (relative to the working directory)"
SAVED = "set it to the folder in which a run saved checkpoints"


@pytest.mark.parametrize("program", ["generate", "serve", "evaluate"])
def test_before_the_first_training_the_remedy_is_to_train(load, files, program):
    def found(text):
        problems = check_files(load(SETTINGS + "save-interval: 1\n" + text), program=program)
        return next((each.what, each.remedy) for each in problems if each.name == "load")

    assert found("load: runs\nsave: ./runs\n") == (
        "contains no checkpoint yet",
        "train first: start neox-launch with the same configuration",
    )
    for text in ("load: runs\nsave: other\n", "load: runs\nsave: runs\nfinetune: true\n"):
        # The run saves to another folder, or starts from a checkpoint itself.
        assert found(text) == ("contains no checkpoint", SAVED)


@pytest.mark.parametrize("manifest", [None, "no JSON", "[]", '{"tokenizer": {"vocab_size": 20}}'])
def test_a_dataset_without_a_conflicting_manifest_passes(load, files, manifest):
    if manifest is not None:
        (files / "data.manifest.json").write_text(manifest)
    assert check_files(load(SETTINGS), program="train") == []


def test_a_dataset_of_another_tokenizer_is_reported_before_the_start(load, files):
    (files / "data.manifest.json").write_text('{"tokenizer": {"vocab_size": 50257}}')
    (problem,) = check_files(load(SETTINGS), program="train")
    assert (problem.name, problem.value, problem.place.line) == ("data_path", "data", 1)
    what = "was tokenized with a vocabulary of 50,257 entries; the configured tokenizer has 20"
    assert problem.what == what


@pytest.mark.parametrize("block", ["tensorboard", "csv_monitor"])
def test_the_folder_of_a_monitor_must_be_writable(load, files, block):
    text = f"{SETTINGS}{block}: {{enabled: true, output_path: data.bin/x}}"
    (problem,) = check_files(load(text), program="train")
    assert (problem.name, problem.place.line) == (f"{block}.output_path", 4)
    assert problem.what == "cannot be written to: no file can be created in data.bin (Not a directory)"
    assert check_files(load(text.replace("true", "false")), program="train") == []


def test_load_of_a_model_of_transformers_names_the_command(load, files):
    folder = files / "pythia"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text("{}")
    (problem,) = check_files(load(SETTINGS + "load: pythia\nfinetune: true"), program="train")
    assert problem.name == "load"
    assert shows(problem.remedy, "neox-convert from-hf pythia", "--output")


def test_packages_of_monitors_are_checked_if_neox_model_is_installed(load, files, monkeypatch):
    config = load(SETTINGS + "tensorboard-dir: events\nuse-wandb: true\n")
    installed = {"neox_model", "tensorboard"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    (problem,) = check_files(config, program="train")
    assert (problem.name, problem.remedy) == (
        "use_wandb",
        "pip install wandb",
    )
    installed.clear()
    assert check_files(config, program="train") == []


def test_packages_of_object_stores_are_checked_for_each_program_that_uses_them(load, files, monkeypatch):
    text = (
        SETTINGS + "save: runs\nsave-interval: 1\ncheckpoint-store: gs://bucket/run\nload: s3://bucket/run\n"
    )
    config = load(text)
    installed = {"neox_model", "fsspec"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    found = [(problem.name, problem.remedy) for problem in check_files(config, program="train")]
    assert found == [("load", "pip install s3fs"), ("checkpoint_store", "pip install gcsfs")]
    found = [problem.name for problem in check_files(config, program="generate") if "fs" in problem.remedy]
    assert found == ["load"]


@pytest.mark.parametrize(
    ("program", "is_refused"), [("generate", True), ("serve", True), ("evaluate", False), ("train", False)]
)
def test_a_masked_model_continues_no_texts(load, files, program, is_refused):
    text = SETTINGS + "objective: masked\nsplit: 0,1,0\n"
    found = {one.name: one for one in check_files(load(text), program=program)}
    assert ("objective" in found) is is_refused
    if is_refused:
        problem = found["objective"]
        assert (problem.value, problem.place.line) == ("masked", 4)
        assert problem.what.endswith("which cannot continue texts")
        assert problem.remedy.startswith("use a model that was trained with objective: causal")
    assert "objective" not in {one.name for one in check_files(load(SETTINGS), program=program)}


@pytest.mark.parametrize("program", ["train", "evaluate"])
def test_tasks_require_the_harness_and_their_folder(load, files, monkeypatch, program):
    text = SETTINGS + "eval-tasks: [piqa]\neval-include-path: missing\neval-results-prefix: data.bin/x\n"
    installed = {"neox_model"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    found = {one.name: one for one in check_files(load(text), program=program) if "eval" in one.name}
    assert set(found) == {"eval_tasks", "eval_include_path", "eval_results_prefix"}
    assert found["eval_tasks"].what == "needs the package lm_eval, which is missing"
    assert found["eval_tasks"].remedy == "pip install 'neox-model[eval]'"
    assert found["eval_tasks"].place.line == 4
    installed.add("lm_eval")
    text = SETTINGS + "eval-tasks: [piqa]\n"
    assert [one for one in check_files(load(text), program=program) if "eval" in one.name] == []


@pytest.mark.parametrize(
    ("program", "prefix", "is_refused"),
    [("train", "", False), ("train", "x", True), ("evaluate", "", True), ("evaluate", "x", True)],
)
def test_the_folder_of_results_is_checked_if_a_file_is_written(
    load, files, monkeypatch, program, prefix, is_refused
):
    def refuse(dir):
        raise OSError(28, "it is full")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    text = f"{SETTINGS}eval-data: data\neval-results-prefix: '{prefix}'\n"
    found = [one for one in check_files(load(text), program=program) if one.name == "eval_results_prefix"]
    assert len(found) == is_refused


def test_data_to_evaluate_is_a_dataset_or_files(load, files):
    def problems(value):
        found = check_files(load(f"{SETTINGS}eval-data: {value}\n"), program="evaluate")
        return [(one.name, one.what) for one in found if one.name != "load"]

    (files / "texts.jsonl").write_text('{"text": "a"}')
    assert problems("texts.jsonl") == problems("data") == problems("'*.txt'") == []
    (found,) = problems("text.jsonl")
    assert found == ("eval_data", "does not exist, and neither does the dataset text.jsonl.idx")
    (files / "half.idx").write_bytes(b"")
    (found,) = problems("half")
    assert found[0] == "eval_data"


def test_evaluations_on_tasks_and_texts_need_no_training_data(load, files):
    (files / "texts.txt").write_text("a")
    text = SETTINGS.replace("data-path: data\n", "").replace("data-path: data", "")
    names = {one.name for one in check_files(load(text + "\neval-data: texts.txt\n"), program="evaluate")}
    assert "data_path" not in names


@pytest.mark.parametrize(
    ("folders", "remedy"),
    [
        ("save: runs\nsave-interval: 1\nload: runs/", None),
        ("load: old", None),
        ("load: misspelt", f"{SAVED}; to start from new weights, "),
        ("save: runs\nsave-interval: 1\nload: run", f"{SAVED}; "),
        ("load: old/global_step5", None),
        ("load: old/global_step5/.", None),
        ("load: old/global_step6", "set it to old, the folder of all checkpoints; "),
    ],
)
def test_load_may_be_empty_only_if_it_is_the_folder_of_save(load, files, folders, remedy):
    (files / "old/global_step5").mkdir(parents=True)
    (files / "old/global_step5/manifest.json").write_text("{}")
    problems = check_files(load(f"{SETTINGS}{folders}\n"), program="train")
    if remedy is None:
        assert problems == []
        return
    (problem,) = problems
    assert (problem.name, problem.what) == ("load", "contains no checkpoint")
    assert problem.remedy.startswith(remedy)


@pytest.mark.parametrize("program", ["train", "generate", "serve", "evaluate"])
@pytest.mark.parametrize(
    ("file", "folders"),
    [
        ("layer_00-model_00-model_states.pt", "load: theirs"),
        ("mp_rank_00_model_states.pt", "load: theirs/global_step20"),
        # The usual style of GPT-NeoX.
        ("mp_rank_00_model_states.pt", "load: theirs\nsave: theirs\nsave-interval: 1"),
    ],
)
def test_load_of_a_checkpoint_of_gpt_neox_names_the_command_that_converts_it(
    load, files, program, file, folders
):
    for iteration in (9, 20):
        folder = files / f"theirs/global_step{iteration}"
        folder.mkdir(parents=True)
        (folder / file).touch()
    (files / "theirs/latest").write_text("global_step20")
    problems = check_files(load(f"{SETTINGS}{folders}\n"), program=program)
    (problem,) = (each for each in problems if each.name == "load")
    begins = "is" if folders.endswith("global_step20") else "contains"
    assert problem.what == f"{begins} a checkpoint of GPT-NeoX"
    command = "neox-convert from-neox theirs/global_step20 --output imported"
    assert command in problem.remedy


@pytest.mark.parametrize(
    ("text", "content", "found"),
    [
        ("sample-input-file: prompts", b"\xef\xbb\xbf\n \n", ("sample_input_file", "contains no prompts")),
        ("sample-input-file: prompts", b"one\n", None),
        ("text-gen-type: unconditional", b"", ("num_samples", "is 0, so no text would be generated")),
        ("text-gen-type: unconditional\nnum-samples: 2", b"", None),
        ("text-gen-type: interactive", b"", None),
        ("sample-input-file: absent", b"", ("sample_input_file", "does not exist")),
        (
            "text-gen-type: input-file\nsample-input-file: absent",
            b"",
            ("sample_input_file", "does not exist"),
        ),
        ("text-gen-type: unconditional\nnum-samples: 2\nsample-input-file: absent", b"", None),
        ("text-gen-type: interactive\nsample-input-file: prompts", b"", None),
        (
            "text-gen-type: input-file",
            b"",
            ("sample_input_file", "is missing; text-gen-type: input-file requires it"),
        ),
        ("text-gen-type: input-file\nprompt: Once", b"", None),
    ],
)
def test_generation_without_anything_to_generate_is_reported(load, files, text, content, found):
    (files / "prompts").write_bytes(content)
    (files / "old/global_step5").mkdir(parents=True)
    (files / "old/global_step5/manifest.json").write_text("{}")
    problems = check_files(load(f"{SETTINGS}load: old\n{text}\n"), program="generate")
    assert [(problem.name, problem.what) for problem in problems] == ([] if found is None else [found])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", [("split", "969, 30, 1", "leaves no document for validation and the test: data has 1")]),
        ("split: 1,0,0", [("split", "1,0,0", "leaves no document for validation and the test: data has 1")]),
        ("split: 0,0,1", []),
        ("split: 0,1,0\neval-iters: 0", [("eval_iters", "0", "is 0, so nothing would be evaluated")]),
    ],
)
def test_an_evaluation_of_nothing_is_refused_before_the_start(load, files, text, found):
    (files / "old/global_step5").mkdir(parents=True)
    (files / "old/global_step5/manifest.json").write_text("{}")
    problems = check_files(load(f"{SETTINGS}load: old\n{text}\n"), program="evaluate")
    # Training without documents is another problem of these splits.
    problems = [problem for problem in problems if "for training" not in problem.what]
    assert [(problem.name, problem.value, problem.what) for problem in problems] == found
    is_default = found == [] or found[0][1] == "969, 30, 1"
    assert all(problem.place == Place(DEFAULTS) if is_default else problem.place.line for problem in problems)


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("prompts", "sample-input-file"),
        ("./link", "sample-input-file"),
        ("texts", "sample-input-file"),
        ("tokenizer.json", "vocab-file"),
    ],
)
def test_generated_texts_do_not_overwrite_a_file_that_is_read(load, files, output, name):
    (files / "prompts").write_text("one\n")
    (files / "link").symlink_to("prompts")
    # Results are written to this name first.
    (files / "texts.partial").symlink_to("prompts")
    text = f"{SETTINGS}sample-input-file: prompts\nsample-output-file: {output}\n"
    (problem,) = check_files(load(text), program="prompts")
    assert (problem.name, problem.place.line) == ("sample_output_file", 5)
    assert problem.what == f"is also the {name}, which would be overwritten"
    assert (
        check_files(
            load(text.replace(f"output-file: {output}", "output-file: texts.jsonl")), program="prompts"
        )
        == []
    )


@pytest.mark.parametrize("latest", ["../elsewhere", "global_step5"])
def test_latest_checkpoint_is_read_only_inside_its_folder(load, files, latest):
    other = files / ("elsewhere" if latest.startswith("..") else "old/global_step5")
    other.mkdir(parents=True, exist_ok=True)
    shape = '{"contents": {"tensors": {"embedding.word_embeddings.weight": {"shape": [3, 4]}}}}'
    (other / "manifest.json").write_text(shape)
    (files / "old").mkdir(exist_ok=True)
    (files / "old/latest").write_text(latest)
    (files / "old/global_step5").mkdir(exist_ok=True)
    (files / "old/global_step5/manifest.json").touch()
    problems = check_files(load(f"{SETTINGS}load: old\n"), program="evaluate")
    is_inside = not latest.startswith("..")
    assert any("the model in old has 3 tokens" in problem.what for problem in problems) is is_inside


ADAPTERS = SETTINGS + "lora-rank: 2\nload: base\n"


@pytest.mark.parametrize("program", ["train", "evaluate", "generate"])
def test_the_base_of_adapters_is_found_before_the_start(load, files, program):
    def write(name, contents):
        folder = files / name / "global_step5"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"contents": contents}))
        return folder

    def problem_of(base):
        program_of = {"train": "", "evaluate": "eval-iters: 1\n", "generate": "text-gen-type: interactive\n"}
        text = f"{ADAPTERS}{program_of[program]}lora-base: {base}\n"
        found = [each for each in check_files(load(text), program=program) if each.name == "lora_base"]
        return "; ".join(f"{each.what}; {each.remedy}" for each in found)

    write("base", {"config": {}, "files": {}})
    assert problem_of("base") == ""
    (files / "empty").mkdir()
    assert problem_of("empty") == f"contains no checkpoint; {SAVED}"
    assert problem_of("nowhere") == f"contains no checkpoint; {SAVED}"
    assert shows(problem_of("base/global_step5"), "set it to base,")


LOCAL = SETTINGS + "save: runs/local\nsave-interval: 1\ncheckpoint: {use_node_local_storage: true}\n"


def test_local_checkpoints_are_not_looked_for_on_this_host(load, files):
    (files / "runs").write_text("here, but not on the hosts, it is a file")
    assert check_files(load(LOCAL + "load: other\n"), program="train") == []
    (problem,) = check_files(load(LOCAL.replace("true", "false")), program="train")
    assert problem.name == "save"


def test_restarts_with_local_checkpoints_require_that_they_resume(load, files):
    loads = LOCAL + "load: runs/local\n"
    for text, found in (
        (LOCAL, ["load"]),
        (loads, []),
        (loads + "no-load-optim: true\nno-load-rng: true\n", ["no_load_optim", "no_load_rng"]),
    ):
        plan = SimpleNamespace(
            resolved=resolve(load(text), devices=1),
            program="train",
            world=World(hosts=(Host("localhost", (0,)),), gpus=0),
            max_restarts=3,
        )
        assert [problem.name for problem in preflight(plan)] == found
        plan.max_restarts = 0
        assert preflight(plan) == []


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("load: saved", None),
        ("load: ./saved", None),
        ("", "load: saved"),
        ("load: base", "load: saved"),
        ("load: saved\nfinetune: true", "load: saved and finetune: false"),
    ],
)
def test_checkpoints_that_a_training_would_replace_are_noted(load, files, text, remedy):
    config = load(f"{SETTINGS}save: saved\nsave-interval: 5\n{text}\n")
    assert notes_on_save(config) == []
    for name in ("global_step5", "global_step10", "global_step20.tmp"):
        (files / "saved" / name).mkdir(parents=True)
    assert notes_on_save(config) == []
    for name in ("global_step5", "global_step10"):
        (files / "saved" / name / "manifest.json").write_text("{}")
    notes = [(note.name, note.place.line, note.remedy) for note in notes_on_save(config)]
    expected = ("save", 4, f"use another folder, or set {remedy}")
    assert notes == ([] if remedy is None else [expected])


def test_a_program_that_reads_the_start_of_a_training_is_told_where_it_saved(load, files):
    settings = f"{SETTINGS}save: saved\nsave-interval: 5\nfinetune: true\n"
    config = load(f"{settings}load: start")
    assert notes_on_load(config) == []
    (files / "saved" / "global_step5").mkdir(parents=True)
    (files / "saved" / "global_step5" / "manifest.json").write_text("{}")
    (note,) = notes_on_load(config)
    assert (note.name, note.value, note.place.line) == ("load", "start", 7)
    assert note.what == "is read, and not save: saved, which has checkpoints up to global_step5"
    assert note.remedy == "for these, add --set load=saved"
    assert notes_on_load(load(f"{settings}load: start\ncheckpoint: {{use_node_local_storage: true}}")) == []
    for other in ("load: saved", "load: saved/global_step5", "load: s3://bucket/start", "load: null"):
        assert notes_on_load(load(f"{settings}{other}")) == []
    assert notes_on_load(load(f"{settings}load: start", "load=start")) == []


def test_a_dataset_without_its_tokens_is_not_answered_with_its_own_name(load, files):
    (files / "data.bin").unlink()
    (problem,) = check_files(load(SETTINGS), program="train")
    assert problem.what == "data.bin does not exist"
    assert problem.remedy == f"{HERE}, or create it with preprocess_data"


def test_a_folder_in_which_no_file_can_be_created_is_found(load, files):
    (problem,) = check_files(load(f"{SETTINGS}save: /proc/x\nsave-interval: 5"), program="train")
    assert (problem.name, problem.place.line) == ("save", 4)
    assert "/proc" in problem.what
    before = sorted(files.iterdir())
    assert check_files(load(f"{SETTINGS}save: x\nsave-interval: 5"), program="train") == []
    assert sorted(files.iterdir()) == sorted({*before, files / "more.yml"})


STUDENT = """\
compression_training:
  layer_reduction:
    {enabled: true, keep_number_layer: LAYERS, teacher_layer: [TAKEN], module_name_prefix: layers,
     teacher: TEACHER}
"""


def test_the_teacher_of_a_student_is_found_before_the_start(load, files):
    def write(name):
        folder = files / name / "global_step5"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")

    layers = load(SETTINGS).model.num_layers

    def problem_of(teacher, more="", options=""):
        text = STUDENT.replace("TEACHER", teacher + options).replace("LAYERS", str(layers))
        text = SETTINGS + text.replace("TAKEN", ", ".join(map(str, range(layers)))) + more
        found = [each for each in check_files(load(text), program="train") if each.name.endswith(".teacher")]
        return "; ".join(f"{each.what}; {each.remedy}" for each in found)

    write("big")
    assert problem_of("big") == ""
    assert problem_of("nowhere") == f"contains no checkpoint; {SAVED}"
    assert shows(problem_of("big/global_step5"), "set it to big,")
    write("student")
    distill = ", distill: {enabled: true}"
    begins, continues = "save: new\nsave-interval: 1\nload: new\n", "load: student\n"
    assert "contains no checkpoint" in problem_of("nowhere", begins)
    assert problem_of("nowhere", continues) == ""
    assert "contains no checkpoint" in problem_of("nowhere", continues, distill)


ICT = SETTINGS + "objective: ict\nict-head-size: 8\nblock-data-path: index\n"


def saved(folder):
    """Write what a folder with a complete checkpoint has, as far as preflight reads it."""
    checkpoint = folder / "global_step1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (folder / "latest").write_text("global_step1")


def test_the_masked_model_of_towers_is_checked_unless_a_training_continues(load, files):
    given = ICT + "bert-load: bert\nsave: runs\nsave-interval: 1\nload: runs\n"

    def found():
        return [each for each in check_files(load(given), program="train") if each.name == "bert_load"]

    (problem,) = found()
    assert (problem.what, problem.remedy) == ("contains no checkpoint", SAVED)
    saved(files / "bert")
    assert found() == []
    shutil.rmtree(files / "bert")
    saved(files / "runs")
    assert found() == []


@pytest.mark.parametrize("program", ["index-blocks", "find-blocks"])
def test_programs_of_retrieval_require_towers(load, files, program):
    (files / "index").mkdir()
    (files / "index" / "index.json").write_text("{}")
    (problem,) = check_files(load(ICT), program=program)
    assert (problem.name, problem.what) == ("load", "is missing")
    (files / "runs").mkdir()
    (problem,) = check_files(load(ICT + "ict-load: runs\n"), program=program)
    assert (problem.name, problem.remedy) == ("ict_load", SAVED)
    saved(files / "runs")
    assert check_files(load(ICT + "ict-load: runs\n"), program=program) == []
    assert check_files(load(ICT + "load: runs\n"), program=program) == []
    (problem,) = check_files(load(ICT + "load: runs\ntitles-data-path: names\n"), program=program)
    assert (problem.name, problem.what) == ("titles_data_path", "names.idx does not exist")
    # No document for the run: nothing is trained.
    assert check_files(load(ICT + "load: runs\nsplit: '0,0,1'\n"), program=program) == []
    causal = load(SETTINGS + "load: runs\n")
    problems = {problem.name: problem.what for problem in check_files(causal, program=program)}
    assert problems == {"objective": "has no towers that embed blocks", "block_data_path": "is missing"}


def test_an_index_is_written_to_a_new_folder_and_read_from_an_old_one(load, files):
    saved(files / "runs")
    config = load(ICT + "load: runs\n")
    assert check_files(config, program="index-blocks") == []
    (problem,) = check_files(config, program="find-blocks")
    assert (problem.name, problem.what) == ("block_data_path", "has no index of blocks")
    (files / "index").mkdir()
    (problem,) = check_files(config, program="index-blocks")
    assert (problem.name, problem.what) == ("block_data_path", "exists, and is not an index of blocks")
    below = load(ICT.replace("path: index", "path: data.bin/index") + "load: runs\n")
    (problem,) = check_files(below, program="index-blocks")
    assert problem.what.startswith("cannot be written to: ")


@pytest.fixture
def trained(load, files):
    """Write the checkpoint `old/global_step5` of the run of SETTINGS, with two devices."""
    resolved = resolve(load(SETTINGS), devices=2)
    curve = learning_rate_curve(resolved.config, decay_iterations=resolved.update.decay_iterations)
    contents = {
        "config": flat_values(resolved.config) | {IN_EFFECT: in_effect(resolved)},
        "layout": {"data": 2, "model": 1, "pipe": 1},
        "schedule": {"class": type(curve).__name__, "curve": asdict(curve), "applied_updates": 5},
        "files": {},
    }
    (files / "old/global_step5").mkdir(parents=True)
    (files / "old/global_step5/manifest.json").write_text(json.dumps({"contents": contents}))
    return "old"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("hidden-size: 128", ["a different model: hidden-size: 64 in the checkpoint, 128 in this run; "]),
        ("hidden-size: 128\nfinetune: true", []),
        ("num-layers: 6", ['attention-config: [["global", 4]] in the checkpoint, [["global", 6]] in this']),
        (
            "lr-decay-iters: 7",
            ["lr-decay-iters (by default train-iters) is 10 in the checkpoint, 7 in this run"],
        ),
        ("lr-decay-iters: 7\noverride-lr-scheduler: true", []),
        ("train-iters: 6", ["is 10 in the checkpoint, 6 in this run"]),
        ("train-iters: 5", ["is at iteration 5 and train-iters is 5, so that nothing is left to train"]),
        ("train-iters: 4", ["is at iteration 5 and train-iters is 4, so that nothing is left to train"]),
        (
            "train-iters: 4\noverride-lr-scheduler: true",
            ["is at iteration 5 and train-iters is 4, so that nothing is left to train"],
        ),
        ("train-iters: 4\nuse-checkpoint-lr-scheduler: true", []),
        ("optimizer.type: Lion", ["optimizer states are those of Adam, but this run's optimizer is Lion"]),
        ("optimizer.type: Lion\nno-load-optim: true", []),
        ("optimizer.type: AdamW", []),
        ("lr-decay-iters: 7\nuse-checkpoint-lr-scheduler: true", []),
        # Iterations that follow from data that is not here.
        ("train-iters: null\ntrain-epochs: 2\nwarmup-iters: 5", []),
        (
            "train-iters: null\ntrain-epochs: 2\nwarmup-iters: 5\nhidden-size: 128",
            ["a different model: hidden-size: 64 in the checkpoint, 128 in this run; "],
        ),
    ],
)
@pytest.mark.parametrize("inside", ["", "/global_step5"])
def test_a_checkpoint_that_does_not_fit_is_found_before_the_start(load, trained, text, found, inside):
    changes = dict(line.split(": ") for line in text.splitlines())
    overrides = [f"{name}={value}" for name, value in changes.items()]
    resolved = resolve(load(f"{SETTINGS}load: {trained}{inside}", *overrides), devices=1)
    problems = check_loaded(resolved, program="train")
    assert len(problems) == len(found)
    for problem, expected in zip(problems, found, strict=True):
        assert (problem.name, problem.place.line) == ("load", 4)
        starts_anew = "different model" in problem.what or "nothing is left" in problem.what
        assert ("set load, save and log-dir to other folders" in problem.remedy) == starts_anew
        assert problem.what.startswith("global_step5: the checkpoint")
        assert expected in problem.what


def test_only_a_training_needs_the_schedule_of_a_checkpoint(load, trained):
    resolved = resolve(load(f"{SETTINGS}load: {trained}", "lr-decay-iters=7", "hidden-size=128"), devices=1)
    assert len(check_loaded(resolved, program="train")) == 2
    (problem,) = check_loaded(resolved, program="evaluate")
    assert problem.remedy == "set the checkpoint's values, or set load to another folder"
    assert check_loaded(resolved, program="doctor") == []


@pytest.mark.parametrize("manifest", ["", "[]", '{"contents": {"config": {}, "files": {}, "layout": {}}}'])
def test_a_damaged_checkpoint_is_left_to_the_workers(load, trained, files, manifest):
    (files / "old/global_step5/manifest.json").write_text(manifest)
    resolved = resolve(load(f"{SETTINGS}load: {trained}", "hidden-size=128"), devices=1)
    assert check_loaded(resolved, program="train") == []


@pytest.mark.parametrize(
    ("text", "program", "remedy"),
    [
        ("vocab-file: no.json", "train", HERE),
        (
            "tokenizer-type: GPT2BPETokenizer\nmerge-file: no.txt\nvocab-file: vocab.json",
            "train",
            HERE,
        ),
        ("vocab-file: /no.json", "train", "check the path"),
        ("sample-input-file: no.txt", "prompts", HERE),
    ],
)
def test_a_missing_file_is_searched_from_the_working_directory(load, files, text, program, remedy):
    (files / "vocab.json").write_text("{}")
    given = dict(line.split(": ") for line in (SETTINGS + text).splitlines())
    config = load("".join(f"{name}: {value}\n" for name, value in given.items()))
    (problem,) = check_files(config, program=program)
    assert (problem.what, problem.remedy) == ("does not exist", remedy)


def test_a_folder_in_place_of_the_file_of_a_tokenizer_is_refused(load, files):
    (files / "model").mkdir()
    text = SETTINGS.replace("tokenizer.json", "model")
    (problem,) = check_files(load(text), program="train")
    assert (problem.what, problem.remedy.startswith("check the path")) == ("is a folder", True)


def write_int32(prefix, rows):
    """Write a dataset of int32, one document per row."""
    ends = [4 * sum(map(len, rows[:number])) for number in range(len(rows))]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, len(rows), 0)
    sizes = struct.pack(f"<{len(rows)}i", *map(len, rows))
    Path(f"{prefix}.idx").write_bytes(header + sizes + struct.pack(f"<{len(rows)}q", *ends))
    flat = [token for row in rows for token in row]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(flat)}i", *flat))


OWN_LISTS = "vocab-file: tokenizer.json\ntokenizer-type: HFTokenizer\neval-iters: 0\n" + "".join(
    f"{part}-data-paths: [tokens]\n{part}-label-data-paths: [labels]\n" for part in ("train", "valid", "test")
)
LATE = [-100] * 40 + [5]


@pytest.mark.parametrize(
    ("labels", "options", "what", "remedy"),
    [
        (
            [LATE, [-100] * 5],
            "pack-impl: best_fit",
            "2 without a label that counts in its first 33 tokens, which are a sample",
            "increase seq-length, shorten the documents, or create the data again with labels",
        ),
        ([LATE, [-100, 7]], "pack-impl: best_fit", None, None),
        # Nothing predicts the first token of a sample.
        ([[7, -100]], "pack-impl: unpacked", "1 without a label that counts", "increase seq-length"),
        (
            [LATE, [], [-100]],
            "pack-impl: best_fit\nallow-chopped: false",
            "1 empty, 1 longer than a sample of 33 tokens, 1 without a label that counts",
            "use other data; increase seq-length or set allow-chopped: true; increase seq-length, shorten",
        ),
        # Samples that are cut from all documents one after another contain late labels, too.
        ([LATE], "", None, None),
        (
            [[-100] * 41],
            "",
            "1 without a label that counts",
            "create the data again with labels",
        ),
    ],
)
def test_data_without_a_document_to_learn_from_is_refused(load, files, labels, options, what, remedy):
    write_int32("labels", labels)
    write_int32("tokens", [[1] * len(row) for row in labels])
    problems = check_files(load(f"{OWN_LISTS}{options}\n"), program="train")
    if what is None:
        assert problems == []
        return
    (problem,) = problems
    assert (problem.name, problem.value) == ("train_label_data_paths", "labels")
    assert problem.what.startswith(f"has no document that can be used: {what}")
    assert problem.remedy.startswith(remedy)


def test_documents_to_evaluate_on_are_checked_if_they_are_read(load, files):
    write_int32("labels", [LATE])
    write_int32("tokens", [[1] * len(LATE)])
    text = f"{OWN_LISTS}pack-impl: best_fit\n"
    evaluated = ["valid_label_data_paths", "test_label_data_paths"]
    for iterations, names in (("0", []), ("1", evaluated)):
        config = load(text.replace("eval-iters: 0", f"eval-iters: {iterations}"))
        found = [problem.name for problem in check_files(config, program="train")]
        assert found == ["train_label_data_paths", *names]


@pytest.mark.parametrize(("split", "names"), [("1,1,0", ["data_path"]), ("1,0,0", [])])
def test_each_part_of_the_split_requires_a_document_that_fits(load, files, split, names):
    write_int32("data", [[1] * 5, [1] * 5, [1] * 50, [1] * 50])
    text = f'{SETTINGS}pack-impl: best_fit\nallow-chopped: false\nsplit: "{split}"\n'
    problems = check_files(load(text), program="train")
    assert [problem.name for problem in problems] == names
    assert all("2 longer than a sample of 33 tokens" in problem.what for problem in problems)

"""`neox-launch`, up to the start of workers."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from neox_launcher import launch
from neox_launcher.backends import BACKENDS
from neox_launcher.cli import main
from neox_launcher.config import load_config, resolve
from neox_launcher.errors import ConfigError
from neox_launcher.launch import Request, plan_launch
from neox_launcher.resources.host import Host
from neox_launcher.resources.hosts import find_pool, select
from neox_launcher.resources.local_gpus import count_gpus
from neox_launcher.resources.world import World, missing_devices, slow_without_gpus
from neox_launcher.supervision import Failure, Outcome


@pytest.fixture(autouse=True)
def _on_a_host_without_gpus(monkeypatch):
    monkeypatch.setattr(launch, "count_gpus", lambda environment: 0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a dataset of one document and a tokenizer, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    header = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08" + (1).to_bytes(8, "little") * 2
    Path("data.idx").write_bytes(header + (4).to_bytes(4, "little") + bytes(8) + bytes(8))
    Path("data.bin").write_bytes(bytes(8))
    words = {chr(97 + number): number for number in range(20)}
    Path("tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": []}))
    return tmp_path


FILES = [
    "--set",
    "data-path=data",
    "--set",
    "tokenizer-type=HFTokenizer",
    "--set",
    "vocab-file=tokenizer.json",
]


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.mark.usefixtures("can_train")
def test_a_dry_run_prints_the_plan_and_the_command(minimal, folder):
    kinds = 'attention-config=[[["local", "global"], 2]]'
    settings = [word for text in ("num-gpus=2", "zero-stage=1", kinds) for word in ("--set", text)]
    result = run("--config", minimal, *FILES, *settings, "--dry-run")
    assert result.exit_code == 0
    assert result.stderr == ""
    rows = dict(line.strip().split("  ", 1) for line in result.stdout.splitlines() if "  " in line.strip())
    table = {name.strip(): value.strip() for name, value in rows.items()}
    assert table["workers"] == "2 on 1 host, one per CPU process"
    assert table["localhost"] == "ranks 0 to 1, slots 0, 1"
    assert table["parallel sizes"] == "data 2 x pipe 1 x model 1, ZeRO stage 1"
    assert table["batch"] == "4 samples = micro-batch 2 x accumulation 1 x data 2; 128 tokens"
    assert table["attention types"] == "2 local, 2 global"
    assert table["rendezvous"] == "127.0.0.1:<a free port of localhost>"
    command = shlex.split(result.stdout.splitlines()[-1])
    assert command == [
        "NEOX_TOKEN=(hidden)",
        sys.executable,
        *("-P", "-m", "neox_launcher.node", "--launcher", "127.0.0.1:<a free port>", "--node", "0"),
    ]


@pytest.mark.parametrize("program", ["generate", "evaluate"])
def test_other_programs_take_the_same_options_on_either_side(minimal, folder, program):
    one = run("--config", minimal, program, *FILES, "--dry-run")
    other = run(program, "--config", minimal, *FILES, "--dry-run")
    assert one.exit_code == other.exit_code == 2
    assert f"python -m neox_model.{program}" in one.stdout
    assert "this would not start yet" in one.stderr
    assert "load\n    is missing" in one.stderr


def test_text_is_generated_by_one_copy_whatever_the_batch(minimal):
    request = Request(
        program="generate",
        paths=(str(minimal),),
        overrides=("num-gpus=8", "model-parallel-size=2", "train-batch-size=16", "gas=2"),
    )
    plan = plan_launch(request, gpus=0)
    assert plan.world.size == 2
    assert plan.resolved.derived.data_parallel_size == 1


WRONG = {
    "no file": (["data-path=null"], "data-path: PREFIX"),
    "no data": (["data-path=nowhere/data"], "nowhere/data.idx does not exist"),
    "other data": (["data-path=dat"], "there is data"),
    "an ending": (["data-path=data.bin"], "write the prefix alone: data"),
    "no tokenizer": (["vocab-file=null"], "is missing: HFTokenizer needs it"),
    "a tokenizer that is not there": (["vocab-file=t.json"], "does not exist"),
    "a tokenizer that is a folder": (["vocab-file=."], "is a folder"),
    "nothing to finetune": (["finetune=true", "load=."], "holds no checkpoint"),
    "nothing to go on from": (["load=."], "holds no checkpoint"),
    "a file in the way": (["save=data.idx/x", "save-interval=1"], "cannot be written to: data.idx is a file"),
    "not built": (["eigenvalue.enabled=true"], "is not built yet\n    leave it out"),
    "nccl": (["distributed-backend=nccl"], "needs GPUs, and this host has none"),
    "indivisible": (["model-parallel-size=3", "num-gpus=4"], "does not divide the 4 devices"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_request_that_cannot_work_ends_with_2_and_starts_nothing(minimal, folder, monkeypatch, case):
    monkeypatch.setattr(launch, "supervise", lambda *_, **__: pytest.fail("started"))
    overrides, sentence = WRONG[case]
    names = [override.partition("=")[0] for override in overrides]
    files = [text for text in FILES[1::2] if text.partition("=")[0] not in names]
    options = [option for text in (*files, *overrides) for option in ("--set", text)]
    result = run("--config", minimal, *options)
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_a_truncated_index_is_refused(minimal, folder):
    Path("data.idx").write_bytes(Path("data.idx").read_bytes()[:-3])
    result = run("--config", minimal, *FILES)
    assert result.exit_code == 2
    assert "data.idx holds 51 bytes, but its header describes 54" in result.stderr
    assert "make the two files again with preprocess_data" in result.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(minimal, folder):
    Path("locked").mkdir(mode=0o500)
    result = run("--config", minimal, *FILES, "--set", "save=locked/x", "--set", "save-interval=1")
    assert "locked does not allow it" in result.stderr


def test_a_tokenizer_that_knows_more_than_the_model_is_refused(minimal, folder):
    Path("ck/global_step1").mkdir(parents=True)
    Path("ck/latest").write_text("global_step1")
    shape = {"tensors": {"embedding.word_embeddings.weight": {"shape": [16, 64]}}}
    Path("ck/global_step1/manifest.json").write_text(json.dumps({"contents": shape}))
    result = run("--config", minimal, *FILES, "--set", "load=ck")
    assert result.exit_code == 2
    assert "has 20 entries, but the model in ck knows 16 tokens" in result.stderr


def test_the_workers_exit_code_is_returned_and_the_first_error_is_last(minimal, folder, monkeypatch):
    failure = Failure(rank=1, host="h", time=0, message="the disk is full", traceback=None, exit_code=7)
    monkeypatch.setattr(
        launch, "supervise", lambda *_, **__: Outcome(exit_code=7, first_failure=failure, num_failures=3)
    )
    monkeypatch.setattr(type(BACKENDS["local"]), "missing", lambda self: None)
    result = run("--config", minimal, *FILES)
    assert result.exit_code == 7
    expected = "2 more workers failed after the first\n\nworker 1 on h failed:\nthe disk is full\n"
    assert result.stderr.endswith(expected)


def test_what_is_not_installed_is_named(minimal, folder, monkeypatch):
    monkeypatch.setattr(type(BACKENDS["local"]), "missing", lambda self: "torch is not installed here")
    result = run("--config", minimal, *FILES)
    assert (result.exit_code, result.stderr) == (2, "torch is not installed here\n")


@pytest.mark.usefixtures("can_train")
def test_notes_do_not_stop_a_dry_run(minimal, folder):
    result = run("--config", minimal, *FILES, "--set", "rank=3", "--dry-run")
    assert result.exit_code == 0
    assert "command line: 1 note" in result.stderr


@pytest.mark.parametrize("command", [[], ["generate"], ["evaluate"], ["doctor"]])
def test_help_is_known_by_its_letter(command):
    assert run(*command, "-h").stdout == run(*command, "--help").stdout
    assert run(*command, "-h").exit_code == 0


def test_without_a_file_the_usage_is_told():
    result = run()
    assert result.exit_code == 2
    assert "give at least one --config FILE" in result.stderr


def test_the_commands_never_show_a_traceback(minimal):
    minimal.write_text("{")
    code = "from neox_launcher.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--config", minimal], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "is not YAML" in done.stderr


@pytest.mark.parametrize(
    ("asked", "gpus", "workers"), [(None, 0, 1), (-1, 0, 1), (3, 0, 3), (None, 4, 4), (-1, 4, 4), (2, 4, 2)]
)
def test_devices_are_gpus_or_processes(load, asked, gpus, workers):
    assert local_world(load("", f"num-gpus={'null' if asked is None else asked}"), gpus=gpus).size == workers


def local_world(config, *, gpus):
    pool = find_pool(config, {}, count_gpus=lambda: gpus)
    return World(hosts=select(config, pool), gpus=gpus)


def test_more_gpus_than_there_are_is_told(load):
    with pytest.raises(ConfigError, match="is more than the 2 slots of localhost"):
        local_world(load("", "num-gpus=4"), gpus=2)
    assert missing_devices(load(), local_world(load("", "num-gpus=4"), gpus=4)) == []


def test_a_slot_of_this_machine_without_a_gpu_is_told(load):
    config = load("", "hostfile=hosts")
    (problem,) = missing_devices(config, World(hosts=(Host("localhost", (0, 5)),), gpus=4))
    assert problem.name == "hostfile"
    assert problem.what == "gives this machine slot 5, and only 4 GPUs are visible"


@pytest.mark.parametrize(
    "name",
    [
        "scaled-upper-triang-masked-softmax-fusion",
        "scaled-masked-softmax-fusion",
        "bias-gelu-fusion",
        "bias-dropout-fusion",
        "rope-fusion",
        "layernorm-fusion",
    ],
)
def test_a_fused_operator_asked_for_by_name_needs_a_gpu(load, name):
    asked = load("pos-emb: rotary", f"{name}=true")
    (problem,) = missing_devices(asked, local_world(asked, gpus=0))
    assert problem.name == name.replace("-", "_")
    assert problem.what.startswith("asks for a fused operator, which needs NVIDIA GPUs")
    assert problem.remedy.startswith(f"set {name}: auto or false")
    assert missing_devices(asked, local_world(asked, gpus=1)) == []
    left_open = load("pos-emb: rotary", f"{name}=auto")
    assert missing_devices(left_open, local_world(left_open, gpus=0)) == []


@pytest.mark.parametrize(
    ("text", "name"), [("precision: fp16", "precision"), ("fp16: {enabled: true}", "fp16.enabled")]
)
def test_float16_without_a_gpu_is_a_note(load, text, name):
    asked = load(text)
    assert missing_devices(asked, local_world(asked, gpus=0)) == []
    (note,) = slow_without_gpus(asked, local_world(asked, gpus=0))
    assert (note.name, note.place.line, note.what) == (name, 1, "is slow without GPUs")
    assert slow_without_gpus(asked, local_world(asked, gpus=1)) == []
    assert slow_without_gpus(load("precision: bfloat16"), local_world(asked, gpus=0)) == []


def fake_smi(folder, text, code=0):
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\ncat <<END\n{text}\nEND\nexit {code}\n")
    path.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 3), ("0,2", 2), ("1", 1), ("", 0), ("-1", 0), ("0,-1,2", 1), ("GPU-abc", 1)],
)
def test_visible_gpus_are_counted(tmp_path, monkeypatch, visible, count):
    listing = "\n".join(f"GPU {number}: NVIDIA X (UUID: GPU-{number})\n  MIG 1g" for number in range(3))
    monkeypatch.setenv("PATH", fake_smi(tmp_path, listing) + os.pathsep + os.environ["PATH"])
    assert count_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == count


def test_a_driver_that_does_not_answer_means_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", fake_smi(tmp_path, "failed", code=9) + os.pathsep + os.environ["PATH"])
    monkeypatch.setattr("neox_launcher.resources.local_gpus._DRIVER_FOLDER", tmp_path / "nowhere")
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == 0


def test_examples_of_the_repository_load():
    """Every file in configs/ that is whole by itself plans without a problem."""
    folder = Path(__file__).parents[3] / "configs"
    config = load_config([folder / "quickstart.yml"])
    assert resolve(config, devices=2).derived.world_size == 2

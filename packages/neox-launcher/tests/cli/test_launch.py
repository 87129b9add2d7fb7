"""The command `neox-launch`, up to the start of workers."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from neox_config import load_config, resolve
from neox_config.errors import ConfigError
from neox_launcher.backends import BACKENDS
from neox_launcher.cli.launch import main
from neox_launcher.controller import launch
from neox_launcher.controller.supervision import Failure, Outcome
from neox_launcher.plan import planning
from neox_launcher.plan.planning import Request, plan_launch
from neox_launcher.resources.host import Host
from neox_launcher.resources.hosts import find_pool, select
from neox_launcher.resources.local_gpus import count_gpus
from neox_launcher.resources.world import World, missing_devices, slow_without_gpus
from support.refusals import refused, shows


@pytest.fixture(autouse=True)
def _on_a_host_without_gpus(monkeypatch):
    monkeypatch.setattr(planning, "count_gpus", lambda environment: 0)


@pytest.fixture
def folder(folder):
    """Create a working directory with a dataset and a tokenizer."""
    words = {chr(97 + number): number for number in range(20)}
    Path("tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": []}))
    return folder


FILES = [
    "--set",
    "data-path=data",
    "--set",
    "tokenizer-type=HFTokenizer",
    "--set",
    "vocab-file=tokenizer.json",
    # The only document is for training.
    "--set",
    "eval-iters=0",
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
        *("-P", "-m", "neox_launcher.agent", "--launcher", "127.0.0.1:<a free port>", "--host-number", "0"),
    ]


@pytest.mark.usefixtures("can_train")
def test_a_dry_run_names_the_processes_that_divide_experts(minimal, folder):
    settings = ("num-gpus=4", "moe-num-experts=4", "expert-parallel-size=2")
    result = run("--config", minimal, *FILES, *(f"--set={each}" for each in settings), "--dry-run")
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("parallel sizes")]
    assert row.split("  ", 1)[1].strip() == "data 4 x pipe 1 x model 1, experts on 2, ZeRO stage 0"


def test_a_dry_run_shows_where_the_agents_connect(minimal, folder):
    (folder / "hosts").write_text("10.0.0.7 slots=1\n10.0.0.8 slots=1\n")
    settings = ["hostfile=hosts", "launcher=ssh", "launcher-address=10.0.0.9", "launcher-port=29400"]
    options = [word for text in settings for word in ("--set", text)]
    result = run("--config", minimal, *FILES, *options, "--dry-run")
    assert result.stdout.count("--launcher 10.0.0.9:29400 --host-number ") == 2


@pytest.mark.usefixtures("can_train")
@pytest.mark.parametrize(("launcher", "is_noted"), [("ssh", True), ("local", False)])
def test_a_dry_run_notes_that_it_resolves_no_host_name(minimal, folder, monkeypatch, launcher, is_noted):
    (folder / "hosts").write_text("nowhere.invalid slots=1\n")
    monkeypatch.setattr(type(launch.BACKENDS["ssh"]), "missing", lambda self: None)
    hosts = ["--hostfile", "hosts"] if launcher == "ssh" else []
    result = run("--config", minimal, *FILES, *hosts, "--launcher", launcher, "--dry-run")
    assert result.exit_code == 0
    assert ("resolves no host" in result.stderr) == is_noted


@pytest.mark.usefixtures("can_train")
def test_a_future_allocation_of_slurm_can_be_planned_outside(minimal, folder, monkeypatch):
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    words = ["--config", minimal, *FILES, "--launcher", "slurm"]
    numbers = ["--num-nodes", "2", "--num-gpus", "4"]
    planned = run(*words, *numbers, "--dry-run")
    assert planned.exit_code == 0, planned.stderr
    assert "start neox-launch inside" in planned.stderr
    assert json.loads(run(*words, *numbers, "--dry-run=json").stdout)["problems"] == []
    (folder / "hosts").write_text("node-1 slots=4\nnode-2 slots=4\n")
    by_file = run(*words, "--hostfile", "hosts", "--dry-run")
    assert by_file.exit_code == 0, by_file.stderr
    assert "future Slurm allocation" in by_file.stderr
    refused = run(*words, "--dry-run")
    assert refused.exit_code == 2
    assert shows(refused.stderr, "--num-nodes", "--num-gpus", "--dry-run")
    # Without --dry-run, it is refused as before.
    started = run(*words, *numbers)
    assert started.exit_code == 2
    assert "launcher: slurm requires " in started.stderr


@pytest.mark.parametrize("program", ["generate", "evaluate"])
def test_other_programs_take_the_same_options_on_either_side(minimal, folder, program):
    one = run("--config", minimal, program, *FILES, "--dry-run")
    other = run(program, "--config", minimal, *FILES, "--dry-run")
    assert one.exit_code == other.exit_code == 2
    assert f"python -m neox_model.{program}" in one.stdout
    assert "would be refused" in one.stderr
    assert "load\n    is missing" in one.stderr


def test_one_copy_generates_text_for_any_batch_size(minimal):
    request = Request(
        program="generate",
        paths=(str(minimal),),
        overrides=("num-gpus=8", "model-parallel-size=2", "train-batch-size=16", "gas=2"),
    )
    plan = plan_launch(request, gpus=0)
    assert plan.world.size == 2
    assert plan.resolved.run.layout.data == 1


WRONG = {
    "no file": (["data-path=null"], "data-path: PREFIX"),
    "no data": (["data-path=nowhere/data"], "nowhere/data.idx does not exist"),
    "other data": (["data-path=dat"], "did you mean data?"),
    "an ending": (["data-path=data.bin"], "did you mean data?"),
    "no tokenizer": (["vocab-file=null"], "is missing; HFTokenizer requires it"),
    "a tokenizer that is not there": (["vocab-file=t.json"], "does not exist"),
    "a tokenizer that is a folder": (["vocab-file=."], "is a folder"),
    "nothing to finetune": (["finetune=true", "load=."], "contains no checkpoint"),
    "nothing to resume from": (["load=."], "contains no checkpoint"),
    "a file in the way": (
        ["save=data.idx/x", "save-interval=1"],
        "no file can be created in data.idx (Not a directory)",
    ),
    "nccl": (["distributed-backend=nccl"], "requires GPUs, but none are visible"),
    "indivisible": (["model-parallel-size=3", "num-gpus=4"], "does not divide the 4 devices"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_invalid_request_exits_with_2_and_starts_nothing(minimal, folder, monkeypatch, case):
    monkeypatch.setattr(launch, "supervise", lambda *_, **__: pytest.fail("started"))
    overrides, sentence = WRONG[case]
    names = [override.partition("=")[0] for override in overrides]
    files = [text for text in FILES[1::2] if text.partition("=")[0] not in names]
    options = [option for text in (*files, *overrides) for option in ("--set", text)]
    result = run("--config", minimal, *options)
    assert result.exit_code == 2
    assert sentence in result.stderr


@pytest.mark.parametrize(
    ("written", "suggested"),
    [
        ("plain", "did you mean plain_text_document?"),
        ("plane_text_document", "did you mean plain_text_document"),
        ("zzz", "or create it with preprocess_data"),
    ],
)
def test_the_nearest_of_many_datasets_is_suggested(minimal, folder, written, suggested):
    for name in ("a", "b", "c", "plain_text", "plainer"):
        Path(f"{name}_document.idx").touch()
    result = run("--config", minimal, *FILES[2:], "--set", f"data-path={written}")
    assert result.exit_code == 2
    assert suggested in result.stderr


def test_a_truncated_index_is_refused(minimal, folder):
    Path("data.idx").write_bytes(Path("data.idx").read_bytes()[:-3])
    result = run("--config", minimal, *FILES)
    assert result.exit_code == 2
    assert shows(result.stderr, "data.idx", "51 bytes", "describes 54")
    assert "again with preprocess_data" in result.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(minimal, folder):
    Path("locked").mkdir(mode=0o500)
    result = run("--config", minimal, *FILES, "--set", "save=locked/x", "--set", "save-interval=1")
    assert "permission for locked" in result.stderr


def test_a_tokenizer_with_more_entries_than_the_model_is_refused(minimal, folder):
    Path("ck/global_step1").mkdir(parents=True)
    Path("ck/latest").write_text("global_step1")
    shape = {"tensors": {"embedding.word_embeddings.weight": {"shape": [16, 64]}}}
    Path("ck/global_step1/manifest.json").write_text(json.dumps({"contents": shape}))
    result = run("--config", minimal, *FILES, "--set", "load=ck")
    assert result.exit_code == 2
    assert shows(result.stderr, "20 entries", "16 tokens")


def test_the_workers_exit_code_is_returned_and_the_first_error_is_shown(minimal, folder, monkeypatch):
    failure = Failure(rank=1, host="h", time=0, message="the disk is full", traceback=None, exit_code=7)
    monkeypatch.setattr(
        launch, "supervise", lambda *_, **__: Outcome(exit_code=7, first_failure=failure, num_failures=3)
    )
    monkeypatch.setattr(type(BACKENDS["local"]), "missing", lambda self: None)
    result = run("--config", minimal, *FILES)
    assert result.exit_code == 7
    assert shows(result.stderr, "neox-launch", "1 worker")
    expected = "\nworker 1 on h failed:\nthe disk is full\n\n2 more workers failed after it\n"
    assert result.stderr.endswith(expected)


def test_output_that_is_redirected_ends_with_the_checkpoint_and_the_next_commands(
    minimal, folder, monkeypatch
):
    def train(*_, display, **__):
        display.begin_attempt()
        display.show_status({"iteration": 9, "metrics": {"loss/train": 2.5}, "warnings": 1})
        display.note_iteration(10)
        Path("ck/global_step10").mkdir(parents=True)
        Path("ck/latest").write_text("global_step10")
        Path("ck/global_step10/manifest.json").write_text("{}")
        return Outcome(exit_code=0, first_failure=None, num_failures=0)

    monkeypatch.setattr(launch, "supervise", train)
    monkeypatch.setattr(type(BACKENDS["local"]), "missing", lambda self: None)
    long = "ck-" + 40 * "x"
    settings = [
        "--set",
        "save=ck",
        "--set",
        "load=ck",
        "--set",
        "save-interval=5",
        "--set",
        f"comment={long}",
    ]
    result = run("--config", minimal, *FILES, *settings)
    assert result.exit_code == 0
    assert result.stderr.count("neox-launch: finished\n") == 1
    shown = result.stderr.partition("neox-launch: finished\n")[2].splitlines()
    rows = dict(line.strip().split("  ", 1) for line in shown)
    assert rows["iterations"].strip() == "10 of 10"
    assert rows["checkpoint"].strip() == "ck/global_step10"
    assert shows(rows["last loss"].strip(), "2.5000 (of one")
    assert rows["generate"].split()[:2] == ["neox-launch", "generate"]
    # The only document is for training.
    assert "evaluate" not in rows
    assert "\x1b" not in result.stderr


def test_a_missing_package_is_named(minimal, folder, monkeypatch):
    monkeypatch.setattr(type(BACKENDS["local"]), "missing", lambda self: "torch is not installed here")
    result = run("--config", minimal, *FILES)
    assert (result.exit_code, "torch" in result.stderr) == (2, True)


@pytest.mark.usefixtures("can_train")
def test_other_commands_repeat_only_notes_about_their_own_settings(minimal, folder):
    more = folder / "more.yml"
    more.write_text(
        "output-layer-parallelism: column\ntemperature: 0\ntop-k: 5\n"
        "zero-optimization: {stage: 1, overlap_comm: true}\n"
    )
    settings = ("--config", minimal, *FILES, "--config", more, "--dry-run")
    of_the_model, of_generation, of_zero = (
        "output-layer-parallelism: column",
        "top-k: 5",
        "overlap_comm: true",
    )
    noted = run(*settings).stderr
    assert all(note in noted for note in (of_the_model, of_zero, of_generation))
    for program in ("generate", "evaluate", "serve", "doctor"):
        noted = run(program, *settings).stderr
        assert (of_generation in noted) == (program != "doctor")
        assert of_the_model not in noted
        assert of_zero not in noted
        given = run(program, *settings, "--set", "output-layer-parallelism=row").stderr
        assert "--set output-layer-parallelism: row" in given


@pytest.mark.usefixtures("can_train")
def test_notes_do_not_stop_a_dry_run(minimal, folder):
    result = run("--config", minimal, *FILES, "--set", "rank=3", "--dry-run")
    assert result.exit_code == 0
    assert "1 note" in result.stderr


@pytest.mark.parametrize("command", [[], ["generate"], ["evaluate"], ["doctor"]])
def test_help_has_a_short_option(command):
    assert run(*command, "-h").stdout == run(*command, "--help").stdout
    assert run(*command, "-h").exit_code == 0


@pytest.mark.parametrize("command", [[], ["generate"], ["serve"]])
def test_a_missing_configuration_is_a_usage_error(command):
    result = run(*command)
    assert result.exit_code == 2
    assert shows(result.stderr, "--config FILE (neox-launch", "--data FOLDER")


def test_the_commands_never_show_a_traceback(minimal):
    minimal.write_text("{")
    code = "from neox_launcher.cli.launch import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--config", minimal], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "not valid YAML" in done.stderr


@pytest.mark.parametrize(
    ("asked", "gpus", "workers"), [(None, 0, 1), (-1, 0, 1), (3, 0, 3), (None, 4, 4), (-1, 4, 4), (2, 4, 2)]
)
def test_devices_are_gpus_or_processes(load, asked, gpus, workers):
    assert local_world(load("", f"num-gpus={'null' if asked is None else asked}"), gpus=gpus).size == workers


def local_world(config, *, gpus):
    pool = find_pool(config, {}, count_gpus=lambda: gpus)
    return World(hosts=select(config, pool), gpus=gpus)


def test_more_gpus_than_available_are_reported(load):
    with refused(ConfigError, "2 slots of"):
        local_world(load("", "num-gpus=4"), gpus=2)
    assert missing_devices(load(), local_world(load("", "num-gpus=4"), gpus=4)) == []


def test_a_slot_of_this_machine_without_a_gpu_is_reported(load):
    config = load("", "hostfile=hosts")
    (problem,) = missing_devices(config, World(hosts=(Host("localhost", (0, 5)),), gpus=4))
    assert problem.name == "hostfile"
    assert shows(problem.what, "slot 5", "4 GPUs")


@pytest.mark.parametrize(
    "name",
    [
        "scaled-upper-triang-masked-softmax-fusion",
        "scaled-masked-softmax-fusion",
        "bias-gelu-fusion",
        "bias-dropout-fusion",
        "rope-fusion",
        "layernorm-fusion",
        "rmsnorm-fusion",
        "glu-fusion",
        "loss-fusion",
    ],
)
def test_a_requested_fused_operator_requires_a_gpu(load, name):
    needs = {"rmsnorm-fusion": "\nnorm: rmsnorm", "glu-fusion": "\nactivation: swiglu"}.get(name, "")
    asked = load(f"pos-emb: rotary{needs}", f"{name}=true")
    (problem,) = missing_devices(asked, local_world(asked, gpus=0))
    assert problem.name == name.replace("-", "_")
    assert problem.what.startswith("requires NVIDIA GPUs for its fused operator")
    assert problem.remedy.startswith(f"set {name}: auto or false")
    assert missing_devices(asked, local_world(asked, gpus=1)) == []
    left_open = load(f"pos-emb: rotary{needs}", f"{name}=auto")
    assert missing_devices(left_open, local_world(left_open, gpus=0)) == []


@pytest.mark.parametrize(
    ("text", "name"), [("precision: fp16", "precision"), ("fp16: {enabled: true}", "fp16.enabled")]
)
def test_float16_without_a_gpu_is_a_note(load, text, name):
    asked = load(text)
    assert missing_devices(asked, local_world(asked, gpus=0)) == []
    (note,) = slow_without_gpus(asked, local_world(asked, gpus=0))
    assert (note.name, note.place.line) == (name, 1)
    _, remedy = note.remedy.split("use fp32: --set ")
    assert load(text, remedy).precision.is_fp16 is False
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


def test_a_failing_driver_means_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", fake_smi(tmp_path, "failed", code=9) + os.pathsep + os.environ["PATH"])
    monkeypatch.setattr("neox_launcher.resources.local_gpus._DRIVER_FOLDER", tmp_path / "nowhere")
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == 0


def test_examples_of_the_repository_load():
    """Every complete configuration in configs/ loads and resolves."""
    folder = Path(__file__).parents[4] / "configs"
    config = load_config([folder / "quickstart.yml"])
    assert resolve(config, devices=2).run.layout.world == 2


# Warned while it reads its files, as a scheduler may do at any moment.
WARNED = """
import os, signal, sys
from neox_launcher.cli import launch as cli
from neox_launcher.backends.local import LocalBackend
LocalBackend.missing = lambda backend: None
plan_launch = cli.plan_launch
def warned(request):
    os.kill(os.getpid(), signal.SIGUSR1)
    return plan_launch(request)
cli.plan_launch = warned
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--set", "num-layers=none"), 2)])
def test_a_sigusr1_before_the_start_does_not_change_the_exit_code(minimal, folder, options, code):
    command = [sys.executable, "-c", WARNED, "--config", str(minimal), *FILES, "--dry-run", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr

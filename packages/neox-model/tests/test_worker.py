import json
import logging
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from neox_config import encode_resolved
from neox_data.errors import DataError
from neox_kernels.errors import KernelUnavailable
from neox_launcher.protocol.claims import SAVES_TO
from neox_launcher.worker.ranks import RankInfo
from neox_model import worker
from neox_model.api.alone import groups_of_one
from neox_model.checkpoint.storage import folder_lock
from neox_model.errors import LayoutError, StopRequested
from neox_model.processes import (
    _ALLOCATOR_VARIABLES,
    _log_backend,
    configure_allocator,
    join_processes,
    leave_processes,
    load_tokenizer,
)
from neox_model.torch_compat import expand_segments
from neox_model.worker import run_worker
from support.refusals import shows
from support.settings import TINY, resolved_from

GROWS = "expandable_segments:True"


def succeed(resolved):
    return f"seed {resolved.config.training.seed}"


def fail_foreseen(resolved):
    raise DataError("corpus.idx is short")


def fail_for_the_request(resolved):
    raise LayoutError("8 / 3")


def fail_unforeseen(resolved):
    raise ZeroDivisionError("division by zero")


def stopped(resolved):
    raise StopRequested("Ctrl-C received", exit_code=130)


def fail_to_encode(resolved):
    "l\u00e4uf".encode("ascii")


def fail_for_want_of_a_kernel(resolved):
    raise KernelUnavailable("rope-fusion: no GPU")


def count_files(resolved):
    return str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a function of this file as rank 0 of a launch; gives the exit code and the report of a failure."""
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    monkeypatch.setattr("neox_model.worker.register_worker", lambda rank: None)
    monkeypatch.setattr("neox_model.worker.configure_logging", lambda rank: None)
    monkeypatch.setitem(sys.modules, "program_of_this_test", sys.modules[__name__])

    def call(function, **request):
        arguments = {"resolved": None, "paths": (), "overrides": (), "joins": False} | request
        code = run_worker(f"program_of_this_test:{function.__name__}", **arguments)
        report = tmp_path / "rank-0.error.json"
        return code, json.loads(report.read_text()) if report.exists() else None

    return call


def test_the_launchers_request_is_decoded_and_the_result_printed(run, capsys):
    assert run(succeed, resolved=encode_resolved(resolved_from({"seed": 42}))) == (0, None)
    assert capsys.readouterr().out == "seed 42\n"


def test_several_processes_of_an_mpi_by_hand_are_refused(run, monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    code, report = run(succeed, paths=(tmp_path / "any.yml",))
    assert code == 2
    assert report["message"].startswith(
        "an MPI started this as one of 2 processes, each of which would train"
    )


def test_configuration_files_and_overrides_make_a_request_by_hand(run, capsys, tmp_path):
    config = tmp_path / "tiny.yml"
    config.write_text(json.dumps(TINY))
    assert run(succeed, paths=(config,), overrides=("seed=43",)) == (0, None)
    assert capsys.readouterr().out == "seed 43\n"


# What neox-launch refuses before it starts anything.
REFUSED_BY_HAND = {
    "zero_optimization={stage: 3, zero_quantized_weights: true}": (
        "requires NVIDIA GPUs for DeepSpeed's operator quantizer"
    ),
    "autotuning.enabled=true": "--set autotuning.enabled: true\n    needs neox-launch",
    "data-path=gone": "--set data-path: gone\n    gone.idx does not exist",
    "load=empty": "--set load: empty\n    contains no checkpoint",
    "distributed-backend=nccl": "--set distributed-backend: nccl\n    requires GPUs",
}


@pytest.mark.parametrize("override", REFUSED_BY_HAND)
def test_a_worker_by_hand_refuses_what_the_launcher_refuses(run, tmp_path, monkeypatch, override):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("neox_launcher.plan.preflight.count_gpus", lambda: 0)
    (tmp_path / "empty").mkdir()
    config = tmp_path / "tiny.yml"
    config.write_text(json.dumps(TINY))
    code, report = run(succeed, paths=(config,), overrides=(override,), preflight="train")
    assert code == 2
    assert REFUSED_BY_HAND[override] in report["message"]


@pytest.mark.parametrize(("world_size", "code"), [(1, 2), (2, 0)])
def test_a_worker_alone_by_hand_refuses_a_folder_in_use(run, tmp_path, monkeypatch, world_size, code):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("neox_launcher.plan.preflight.count_gpus", lambda: 0)
    monkeypatch.setattr(
        worker,
        "read_rank",
        lambda: RankInfo(
            rank=0,
            local_rank=0,
            world_size=world_size,
            local_world_size=world_size,
            master_addr="::1",
            master_port=1,
        ),
    )
    monkeypatch.setattr(worker, "refuse_worker_by_hand", lambda config, program: None)
    config = tmp_path / "tiny.yml"
    config.write_text(json.dumps({**TINY, "save": "runs", "save_interval": 1}))
    with folder_lock(Path("runs"), patience=0.0, use=SAVES_TO):
        assert run(succeed, paths=(config,), preflight="train")[0] == code


def test_a_worker_by_hand_prints_the_notes_of_its_configuration(run, tmp_path, capsys):
    config = tmp_path / "tiny.yml"
    config.write_text(json.dumps({**TINY, "rotary_pct": 0.5, "num_gpus": 4}))
    run(succeed, paths=(config,), preflight="train")
    shown = capsys.readouterr().err
    assert shows(shown, "rotary_pct: 0.5", "pos_emb")
    assert shows(shown, "num_gpus: 4", "neox-launch")


def test_a_worker_of_a_launch_does_not_repeat_the_preflight_checks(run):
    assert run(succeed, resolved=encode_resolved(resolved_from({})), preflight="train") == (0, None)


def test_without_a_request_it_is_the_requests_fault(run):
    code, report = run(succeed)
    assert (code, report["exit_code"]) == (2, 2)
    assert "--config" in report["message"]


def test_expected_error_is_reported_without_traceback(run):
    code, report = run(fail_foreseen, resolved=encode_resolved(resolved_from({})))
    assert (code, report["message"], report["traceback"]) == (1, "corpus.idx is short", None)


def test_a_worker_may_open_as_many_files_as_its_user(run, capsys):
    """It has shards, parts of datasets and connections open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        assert run(count_files, resolved=encode_resolved(resolved_from({}))) == (0, None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert int(capsys.readouterr().out) == min(hard, 1_048_576)


def test_a_wrong_request_keeps_its_exit_code(run):
    code, report = run(fail_for_the_request, resolved=encode_resolved(resolved_from({})))
    assert (code, report["message"]) == (2, "8 / 3")


def test_a_kernel_that_cannot_be_used_is_a_wrong_request(run):
    code, report = run(fail_for_want_of_a_kernel, resolved=encode_resolved(resolved_from({})))
    assert (code, report["message"], report["traceback"]) == (2, "rope-fusion: no GPU", None)


def rank_of_a_group(groups, resolved):
    assert torch.distributed.is_initialized()
    return groups.world.size, resolved.config.training.seed


def test_a_program_receives_the_processes_which_are_left_afterwards(run, capsys):
    request = encode_resolved(resolved_from({"seed": 42}))
    assert run(rank_of_a_group, resolved=request, joins=True) == (0, None)
    assert capsys.readouterr().out == "(1, 42)\n"
    assert not torch.distributed.is_initialized()


def test_a_reader_that_has_gone_does_not_end_the_work():
    program = (
        "from neox_model.worker import show; show('one'); show('two'); open('/dev/stderr', 'w').write('done')"
    )
    command = f'{sys.executable} -c "{program}" | true; exit ${{PIPESTATUS[0]}}'
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "done")


def test_unexpected_error_is_reported_with_traceback(run):
    code, report = run(fail_unforeseen, resolved=encode_resolved(resolved_from({})))
    assert (code, report["message"].split(":")[0]) == (1, "ZeroDivisionError")
    assert "fail_unforeseen" in report["traceback"]


def test_a_worker_is_registered_before_torch_and_deepspeed_are_imported():
    program = "import sys, neox_model.train.__main__; print({'torch', 'deepspeed'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


@pytest.mark.slow
def test_a_training_without_partitions_does_not_import_what_takes_seconds_and_is_not_used():
    slow = {"deepspeed", "sympy", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"}
    program = (
        "import sys, neox_model.train.open_run, neox_model.engine.torch_engine; print(sorted(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "neox_model.train.open_run" in result.stdout
    assert {name for name in slow if repr(name) in result.stdout} == set()


def test_a_name_that_the_environment_cannot_encode_is_one_sentence(run):
    code, report = run(fail_to_encode, resolved=encode_resolved(resolved_from({})))
    assert (code, report["traceback"]) == (2, None)
    assert report["message"].endswith(" set PYTHONUTF8=1")


def test_the_import_of_torch_is_announced(run, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "neox_model")
    run(succeed, resolved=encode_resolved(resolved_from({})))
    assert "importing torch" not in caplog.messages
    monkeypatch.delitem(sys.modules, "torch")
    run(succeed, resolved=encode_resolved(resolved_from({})))
    assert "importing torch" in caplog.messages


def test_a_signal_is_reported_by_the_launcher_or_by_a_worker_without_one(run, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "neox_model")
    request = encode_resolved(resolved_from({}))
    assert run(stopped, resolved=request) == (130, None)
    assert "Ctrl-C received: ending" not in caplog.messages
    monkeypatch.delenv("NEOX_RUN_DIR")
    assert run(stopped, resolved=request) == (130, None)
    assert "Ctrl-C received: ending" in caplog.messages


def test_one_process_logs_its_device_and_several_how_they_communicate(caplog):
    caplog.set_level(logging.INFO, "neox_model")
    _log_backend("gloo", resolved_from({}).run.layout, has_gpus=False)
    _log_backend("gloo", resolved_from({}, devices=2).run.layout, has_gpus=False)
    one, several = caplog.messages
    assert one.startswith("computing on the CPU (no GPU found), torch ")
    assert several.startswith("torch.distributed runs over gloo (no GPU found), torch ")


@pytest.fixture
def allocator(monkeypatch):
    """Return a function that reads the settings of the allocator, whose segments do not grow before."""
    for name in _ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    yield torch._C._accelerator_getAllocatorSettings
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@contextmanager
def as_worker(layout, engine):
    yield join_processes(layout, engine)
    leave_processes()


@pytest.mark.parametrize("start", [as_worker, groups_of_one])
@pytest.mark.parametrize("is_set", [True, False])
def test_workers_and_trainers_grow_segments_of_memory_if_that_is_set(allocator, start, is_set):
    resolved = resolved_from({"expandable-segments": is_set})
    with start(resolved.run.layout, resolved.config.engine):
        assert allocator() == f"expandable_segments:{is_set}"


@pytest.mark.parametrize("variable", _ALLOCATOR_VARIABLES)
@pytest.mark.parametrize(
    ("value", "is_logged"), [("max_split_size_mb:64", True), (f"backend:native,{GROWS}", False)]
)
def test_settings_of_the_allocator_in_the_environment_win(
    allocator, monkeypatch, caplog, variable, value, is_logged
):
    caplog.set_level(logging.INFO, "neox_model")
    monkeypatch.setenv(variable, value)
    configure_allocator(resolved_from({"expandable-segments": True}).config.engine)
    assert allocator() == "expandable_segments:False"
    line = f"expandable-segments has no effect: the environment has {variable}={value}"
    assert caplog.messages == ([line] if is_logged else [])


@pytest.mark.slow
def test_the_variable_that_the_setting_replaces_has_the_same_effect_in_a_new_process(allocator):
    expand_segments()
    command = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": GROWS}
    run = subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == allocator() == GROWS


def test_a_tokenizer_is_loaded_without_files_that_it_does_not_read(tmp_path):
    values = {"tokenizer-type": "CharLevelTokenizer", "vocab-file": "no.json", "merge-file": "no.txt"}
    tokenizer = load_tokenizer(resolved_from(values).config.tokenizer)
    assert tokenizer.vocab_size == 512

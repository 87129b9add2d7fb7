"""Saves in the background: the same bytes as synchronous ones, and what is left when something dies."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Event, Timer, current_thread, main_thread
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from neox_model.checkpoint import directory as folders
from neox_model.checkpoint import shard_writer, writer_process
from neox_model.checkpoint.background import BackgroundSaves
from neox_model.checkpoint.checksums import Checksums
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.shards import Part, plan_shard
from neox_model.checkpoint.snapshot import Snapshot, _pin
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.parallel.topology import create_groups
from support.checkpoint_runs import Run
from support.distributed import run_ranks
from support.refusals import refused, shows

DEADLINE_SECONDS = 120.0


def trained(seed: int = 1) -> Run:
    torch.manual_seed(seed)
    run = Run(layers=2)
    run.train()
    return run


@pytest.fixture
def saves() -> Iterator[BackgroundSaves]:
    found = BackgroundSaves(SINGLE_PROCESS, torch.device("cpu"), patience=60.0)
    yield found
    found.close()


def start(saves: BackgroundSaves, run: Run, folder: Path, **options: object) -> None:
    saves.start(folder, run._parts(), iteration=run.iteration, config=run.config, **options)


def go_on(saves: BackgroundSaves) -> None:
    """Proceed as the run does after every iteration, until nothing is under way."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while saves.iteration is not None:
        saves.proceed()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def signalled_writer(number: int) -> object:
    """Send a signal to each writer as soon as it is started."""
    begin = writer_process._start

    def start_and_signal(*arguments: object) -> "subprocess.Popen[bytes]":
        process = begin(*arguments)
        process.send_signal(number)
        return process

    return patch.object(writer_process, "_start", start_and_signal)


def limited_writer(*, size: int) -> object:
    """Let writers create no file larger than a size, as on a full disk."""
    begin = writer_process._start

    def start_limited(*arguments: object) -> "subprocess.Popen[bytes]":
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            return begin(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return patch.object(writer_process, "_start", start_limited)


def test_the_files_are_those_of_a_synchronous_save_although_the_training_goes_on(tmp_path, saves):
    run = trained()
    final = run.save(tmp_path / "synchronous")
    start(saves, run, tmp_path / "background")
    assert saves.iteration == 1
    run.train()
    go_on(saves)
    assert contents(tmp_path / "background" / "global_step1") == contents(final)
    assert names(tmp_path / "background") == ["global_step1", "latest"]


def test_pieces_have_the_same_checksums_when_there_are_many(tmp_path, saves, monkeypatch):
    monkeypatch.setattr("neox_model.checkpoint.shards._PIECE_ELEMENTS", 5)
    run = trained()
    final = run.save(tmp_path / "synchronous")
    start(saves, run, tmp_path / "background")
    saves.finish()
    assert contents(tmp_path / "background" / "global_step1") == contents(final)


def test_the_memory_grows_and_is_used_again(tmp_path, saves):
    run = trained()
    for keeps in (False, True, False):
        start(saves, run, tmp_path / "background", save_optimizer=keeps)
        final = run.save(tmp_path / "synchronous", save_optimizer=keeps)
        saves.finish()
        assert contents(tmp_path / "background" / final.name) == contents(final)
        run.train()


def test_reserved_memory_is_used(tmp_path, saves):
    run = trained()
    final = run.save(tmp_path / "synchronous")
    saves.prepare(run._parts())
    start(saves, run, tmp_path / "background")
    saves.finish()
    assert saves._snapshot._size == final.joinpath("shard-00000.safetensors").stat().st_size
    assert contents(tmp_path / "background" / final.name) == contents(final)


def test_a_lack_of_memory_is_a_failed_save(tmp_path, saves, monkeypatch, caplog):
    def lacking(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    run = trained()
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", lacking)
        saves.prepare(run._parts())
        with refused(CheckpointError, "global_step1"):
            start(saves, run, tmp_path)
    assert "cannot reserve memory" in caplog.text
    start(saves, run, tmp_path)
    saves.finish()
    assert names(tmp_path) == ["global_step1", "latest"]


def test_more_memory_than_is_available_is_not_requested(tmp_path, saves, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9 kB\nMemAvailable:   2 kB\n")
    monkeypatch.setattr("neox_model.checkpoint.snapshot._MEMORY", meminfo)
    with refused(CheckpointError, "which 2,048", "async-save"):
        start(saves, trained(), tmp_path / "saves")
    assert saves._snapshot._file is None


def with_mapped_memory(monkeypatch: pytest.MonkeyPatch, *, is_pinned: bool) -> list[object]:
    """Let saves treat the CPU as a GPU; return the calls, each with whether it is of the main thread."""
    calls: list[object] = []

    def note(name: str, result: object = None) -> Callable[..., object]:
        def called(*arguments: object) -> object:
            calls.append((name, current_thread() is main_thread()))
            return result

        return called

    monkeypatch.setattr(torch.cuda, "set_device", note("set_device"))
    monkeypatch.setattr(torch.cuda, "synchronize", note("synchronize"))
    monkeypatch.setattr("neox_model.checkpoint.snapshot._pin", note("pin", is_pinned))
    runtime = SimpleNamespace(cudaHostUnregister=note("unregister"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return calls


@pytest.mark.parametrize(("is_pinned", "is_prepared"), [(True, True), (False, False)])
def test_mapped_memory_is_pinned_on_the_device_in_another_thread(
    tmp_path, monkeypatch, is_pinned, is_prepared
):
    calls = with_mapped_memory(monkeypatch, is_pinned=is_pinned)
    run = trained()
    final = run.save(tmp_path / "synchronous")
    saves = BackgroundSaves(SINGLE_PROCESS, torch.device("cuda", 1), patience=60.0)
    if is_prepared:
        saves.prepare(run._parts())
    start(saves, run, tmp_path / "background")
    saves.finish()
    saves.close()
    assert contents(tmp_path / "background" / final.name) == contents(final)
    released = [("unregister", True)] if is_pinned else []
    assert calls == [("set_device", False), ("pin", False), ("synchronize", True), *released]


@pytest.mark.gpu
def test_a_snapshot_of_a_gpu_contains_its_bytes_and_a_failure_to_pin_is_not_kept(caplog):
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(device)
    values = torch.arange(1000, dtype=torch.float32, device=device)
    part = Part(name="values", shape=(1000,), block=((0, 1000),), start=0, values=values)
    plan = plan_shard([part])
    snapshot = Snapshot(device)
    snapshot.reserve(plan.size)
    snapshot.take(plan)
    expected = plan.header + values.cpu().numpy().tobytes()
    assert snapshot._is_pinned
    assert os.pread(snapshot.descriptor, plan.size, 0) == expected
    # Memory that is pinned cannot be pinned again.
    assert not ThreadPoolExecutor(1).submit(_pin, snapshot._mapped).result()
    assert "cannot be pinned" in caplog.text
    assert int((values + 1).sum()) == 500_500
    snapshot.close()


def test_old_checkpoints_are_deleted_when_the_new_one_is_visible(tmp_path, saves):
    run = trained()
    for _ in range(3):
        start(saves, run, tmp_path, keep_last=1)
        saves.finish()
        run.train()
    assert names(tmp_path) == ["global_step3", "latest"]


def test_values_that_are_not_finite_are_not_saved(tmp_path, saves):
    run = trained()
    run.model.layers[1].data[0, 0] = torch.nan
    with refused(CheckpointError, "layers.1", code="not-finite"):
        start(saves, run, tmp_path)
    saves.settle()
    assert (saves.iteration, names(tmp_path)) == (None, [])


@pytest.mark.parametrize("waits", [True, False])
def test_a_killed_writer_is_a_failed_save_and_the_next_one_works(tmp_path, saves, waits):
    run = trained()
    run.save(tmp_path)
    run.train()
    action: Callable[[BackgroundSaves], None] = BackgroundSaves.finish if waits else go_on
    with signalled_writer(signal.SIGKILL):
        start(saves, run, tmp_path)
        with refused(CheckpointError, "global_step2", "shard-00000", "SIGKILL"):
            action(saves)
    saves.settle()
    assert names(tmp_path) == ["global_step1", "latest"]
    start(saves, run, tmp_path)
    action(saves)
    assert names(tmp_path) == ["global_step1", "global_step2", "latest"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_request_to_stop_does_not_end_the_writer(tmp_path, saves, number):
    with signalled_writer(number):
        start(saves, trained(), tmp_path)
        saves.finish()
    assert names(tmp_path) == ["global_step1", "latest"]


def test_a_disk_that_fills_in_the_writer_is_reported(tmp_path, saves):
    run = trained()
    run.save(tmp_path)
    run.train()
    with limited_writer(size=100):
        start(saves, run, tmp_path)
        with refused(CheckpointError, "global_step2"):
            saves.finish()
    saves.settle()
    assert names(tmp_path) == ["global_step1", "latest"]


def test_a_writer_without_progress_is_ended_and_reported(tmp_path):
    saves = BackgroundSaves(SINGLE_PROCESS, torch.device("cpu"), patience=0.3)
    with signalled_writer(signal.SIGSTOP):
        start(saves, trained(), tmp_path)
        with refused(CheckpointError, "0.3 s", "(hang-timeout)"):
            saves.finish()
    saves.close()
    assert names(tmp_path) == []


def test_closing_ends_the_writer_and_the_next_save_removes_its_folder(tmp_path, saves, caplog):
    run = trained()
    with signalled_writer(signal.SIGSTOP):
        start(saves, run, tmp_path)
    process = saves._stage._process
    saves.close()
    reason = "was not saved: the run ended while it was written"
    assert f"{tmp_path / 'global_step1'} {reason}" in caplog.text
    assert process.returncode == -signal.SIGKILL
    assert names(tmp_path) == [".global_step1.saving"]
    run.save(tmp_path)
    assert names(tmp_path) == ["global_step1", "latest"]


def test_a_publication_that_fails_leaves_the_earlier_checkpoint(tmp_path, saves):
    run = trained()
    run.save(tmp_path)
    run.train()
    start(saves, run, tmp_path)
    saves._stage.wait()
    (tmp_path / ".global_step2.saving" / "shard-00000.safetensors").unlink()
    with refused(CheckpointError, code="not-visible"):
        saves.finish()
    saves.settle()
    assert names(tmp_path) == ["global_step1", "latest"]


def test_a_file_system_that_does_not_answer_stops_neither_the_training_nor_the_failure(
    tmp_path, saves, monkeypatch
):
    answers, run = Event(), trained()

    def slow(temporary: Path) -> None:
        answers.wait(DEADLINE_SECONDS)
        shutil.rmtree(temporary)

    monkeypatch.setattr("neox_model.checkpoint.directory.abandon", slow)
    with signalled_writer(signal.SIGKILL):
        start(saves, run, tmp_path)
        with refused(CheckpointError, "SIGKILL"):
            go_on(saves)
    assert names(tmp_path) == [".global_step1.saving"]
    Timer(0.2, answers.set).start()
    start(saves, run, tmp_path)
    assert answers.is_set()
    saves.finish()
    assert names(tmp_path) == ["global_step1", "latest"]


def test_closing_completes_a_checkpoint_that_is_being_made_visible(tmp_path, saves, monkeypatch):
    publish = folders.place

    def slow(temporary: Path, final: Path) -> None:
        time.sleep(0.3)
        publish(temporary, final)

    monkeypatch.setattr(folders, "place", slow)
    start(saves, trained(), tmp_path)
    saves._stage.wait()
    saves._continue()
    assert names(tmp_path) == [".global_step1.saving"]
    saves.close()
    assert names(tmp_path) == ["global_step1", "latest"]


def test_progress_is_reported_before_all_checksums_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "_CHUNK_BYTES", 4)
    calls: list[object] = []

    class Watched(Checksums):
        def add(self, data: memoryview) -> None:
            calls.append(bytes(data))
            super().add(data)

    monkeypatch.setattr(shard_writer, "Checksums", Watched)
    snapshot = os.memfd_create("test")
    os.pwrite(snapshot, b"hhabcdefgh", 0)
    spans = [(2, 4), (4, 4), (4, 9), (9, 10)]
    sums = shard_writer._write(tmp_path / "shard", snapshot, 10, spans, calls.append)
    os.close(snapshot)
    assert calls == [4, b"ab", b"", 8, 10, b"cdefg", b"h"]
    assert sums == [zlib.crc32(data) for data in (b"ab", b"", b"cdefg", b"h")]
    assert (tmp_path / "shard").read_bytes() == b"hhabcdefgh"


def test_the_writer_starts_without_torch():
    program = (
        f"import sys, {shard_writer.__name__}\n"
        "print(sorted({'torch', 'numpy', 'safetensors', 'deepspeed', 'pydantic'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


_WORKER = """
import subprocess, sys, time, torch
from pathlib import Path
from neox_model.checkpoint.background import BackgroundSaves
from neox_model.checkpoint import writer_process
from neox_model.parallel.groups import SINGLE_PROCESS
from support.checkpoint_runs import Run

def start(path, files):
    program = (
        "import sys, time; from neox_model.checkpoint import shard_writer\\n"
        "shard_writer._write = lambda *arguments: time.sleep(600)\\n"
        "shard_writer.main(sys.argv[1:])"
    )
    words = [sys.executable, "-c", program, str(path), *map(str, files)]
    return subprocess.Popen(words, pass_fds=files)

writer_process._start = start
run = Run()
run.train()
saves = BackgroundSaves(SINGLE_PROCESS, torch.device("cpu"), patience=None)
saves.start(Path(sys.argv[1]), run._parts(), iteration=1, config=run.config)
print(saves._stage._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_the_writer_has_the_lowest_priority_and_ends_with_its_worker(tmp_path):
    words = [sys.executable, "-c", _WORKER, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    worker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    writer = int(worker.stdout.readline())
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, writer) == 19)
    assert is_running(writer)
    worker.kill()
    worker.wait()
    worker.stdout.close()
    wait_until(lambda: not is_running(writer))


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def save_on_two_ranks(directory: str) -> tuple[list[int], list[str]]:
    """Save three times on two ranks, of which rank 1's writer is slower at first, and killed at last.

    Returns:
        For each save the number of calls until it was complete, and the errors.
    """
    torch.manual_seed(1)
    run, rank, folder = Run(groups=create_groups(1, 1)), dist.get_rank(), Path(directory)
    saves = BackgroundSaves(run.groups, torch.device("cpu"), patience=None)
    counts, errors = [], []
    for action in (signal.SIGSTOP, None, signal.SIGKILL):
        run.train()
        # Signalled as it begins: a signal sent later may find a writer that has already finished.
        signalled = signalled_writer(action) if rank == 1 and action is not None else nullcontext()
        with signalled:
            start(saves, run, folder, keep_last=1)
        process = saves._stage._process
        count = 0
        try:
            while saves.iteration is not None:
                saves.proceed()
                count += 1
                if count == 20:
                    process.send_signal(signal.SIGCONT)
                time.sleep(0.01)
        except CheckpointError as error:
            errors.append(str(error))
        counts.append(count)
    saves.close()
    return counts, errors


def test_all_ranks_complete_a_save_at_the_same_iteration_and_fail_together(tmp_path):
    first, second = run_ranks(save_on_two_ranks, size=2, directory=str(tmp_path))
    assert first == second
    counts, errors = first
    assert counts[0] > 20
    assert counts[1] >= 2
    assert len(errors) == 1
    assert shows(errors[0], "global_step3", "rank 1")
    assert names(tmp_path) == ["global_step2", "latest"]


def test_a_sandbox_that_forbids_priorities_does_not_end_a_save(tmp_path, saves, monkeypatch, caplog):
    def forbidden(*arguments: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", forbidden)
    run = trained()
    saves.prepare(run._parts())
    start(saves, run, tmp_path)
    saves.finish()
    assert names(tmp_path) == ["global_step1", "latest"]
    assert "1] Operation not" in caplog.text


def test_a_publication_that_fails_while_an_error_ends_the_training_is_logged(tmp_path, monkeypatch, caplog):
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders, "place", full)
    saves = BackgroundSaves(SINGLE_PROCESS, torch.device("cpu"), patience=60.0)
    start(saves, trained(), tmp_path)
    while not isinstance(saves._stage, Future):
        saves.proceed()
        time.sleep(0.01)
    saves.close()
    (message,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert shows(message, tmp_path / "global_step1", "28")

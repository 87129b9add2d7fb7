"""Uploads to object stores and loading from them: interrupted anywhere, never a wrong checkpoint."""

import io
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile

from neox_config.facts.checkpoints import LATEST, MANIFEST
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint import downloads, object_store
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.downloads import checkpoint_folder, download, local_folder
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.object_store import ObjectStore
from neox_model.checkpoint.shard_file import ShardFile
from neox_model.checkpoint.storage import folder_lock
from neox_model.checkpoint.upload import upload
from neox_model.checkpoint.uploads import Uploads
from neox_model.parallel.groups import SINGLE_PROCESS
from support.checkpoint_runs import Run
from support.refusals import refused

pytestmark = pytest.mark.usefixtures("memory")
URL = "memory://bucket/run"
CHUNK = 5 * 2**20


class DyingStore(ObjectStore):
    """A store that goes away before one of its writes and deletions, and counts them."""

    def __init__(self, url: str, *, dies_before: int | None = None) -> None:
        super().__init__(url, chunk_bytes=CHUNK, patience=0.0)
        self.changes: list[str] = []
        self._dies_before = dies_before

    def _record(self, change: str) -> None:
        if len(self.changes) == self._dies_before:
            raise CheckpointError("the store went away")
        self.changes.append(change)

    def write(self, name: str, source: io.BufferedIOBase) -> None:  # type: ignore[override]
        self._record(f"write {name}")
        super().write(name, source)  # type: ignore[arg-type]

    def delete(self, name: str) -> None:
        self._record(f"delete {name}")
        super().delete(name)


def saved(folder: Path, *, updates: int = 1) -> tuple[Run, Path]:
    run = Run(layers=2)
    for _ in range(updates):
        run.train()
    return run, run.save(folder)


def uploaded(folder: Path, *, updates: int = 1) -> tuple[Run, Path]:
    run, checkpoint = saved(folder, updates=updates)
    upload(checkpoint, DyingStore(URL))
    return run, checkpoint


def loaded(url: str, cache: Path) -> Run | None:
    folder = local_folder(url, SINGLE_PROCESS, cache=str(cache), patience=0.0)
    if folder is None:
        return None
    run = Run(layers=2)
    run.load(folder)
    return run


def test_what_was_uploaded_is_loaded(tmp_path):
    run, folder = saved(tmp_path / "save")
    store = DyingStore(URL)
    upload(folder, store)
    assert store.changes == [
        *(f"delete global_step1/{MANIFEST}", "write global_step1/shard-00000.safetensors"),
        *(f"write global_step1/{MANIFEST}", f"write {LATEST}"),
    ]
    found = loaded(URL, tmp_path / "cache")
    assert (found.iteration, found.weights, found.states) == (1, run.weights, run.states)
    manifest = (folder / MANIFEST).read_bytes()
    downloaded = checkpoint_folder(URL, "global_step1", manifest, cache=str(tmp_path / "cache"))
    assert downloaded.parent.parent == tmp_path / "cache"
    assert (downloaded / LATEST).read_text() == "global_step1\n"


@pytest.mark.parametrize("url", ["memory://bucket/run", "file"])
def test_a_store_that_goes_away_shows_the_earlier_checkpoint_until_the_new_one_is_complete(tmp_path, url):
    url = f"file://{tmp_path}/store" if url == "file" else url
    first, folder = saved(tmp_path / "save")
    upload(folder, DyingStore(url))
    second, folder = saved(tmp_path / "save", updates=2)
    for death in range(4):
        with refused(CheckpointError, "went away"):
            upload(folder, DyingStore(url, dies_before=death))
        run = loaded(url, tmp_path / "cache")
        assert (run.iteration, run.weights) == (1, first.weights)
    upload(folder, DyingStore(url))
    run = loaded(url, tmp_path / "cache")
    assert (run.iteration, run.weights, run.states) == (2, second.weights, second.states)


def test_a_replaced_checkpoint_is_the_old_one_or_incomplete_or_the_new_one(tmp_path):
    old, folder = uploaded(tmp_path / "save")
    new, folder = saved(tmp_path / "save")
    for death in range(4):
        with refused(CheckpointError, "went away"):
            upload(folder, DyingStore(URL, dies_before=death))
        if death in (0, 3):
            assert loaded(URL, tmp_path / "cache").weights == (new if death else old).weights
            continue
        with refused(CheckpointError, "global_step1", "complete"):
            loaded(URL, tmp_path / "cache")
    assert old.weights != new.weights


def test_a_checkpoint_that_the_store_has_is_not_uploaded_again(tmp_path):
    _, folder = uploaded(tmp_path / "save")
    again = DyingStore(URL)
    upload(folder, again)
    assert again.changes == [f"write {LATEST}"]


def test_a_checkpoint_that_is_deleted_meanwhile_stays_incomplete(tmp_path):
    _, folder = uploaded(tmp_path / "save")
    _, folder = saved(tmp_path / "save", updates=2)

    class DeletingStore(DyingStore):
        def delete(self, name: str) -> None:
            for path in folder.iterdir():
                path.unlink()

    with pytest.raises(FileNotFoundError):
        upload(folder, DeletingStore(URL))
    assert loaded(URL, tmp_path / "cache").iteration == 1


def test_a_truncated_shard_is_not_uploaded(tmp_path):
    _, folder = saved(tmp_path / "save")
    os.truncate(folder / "shard-00000.safetensors", 100)
    with refused(CheckpointError, "100 bytes"):
        upload(folder, DyingStore(URL))
    assert loaded(URL, tmp_path / "cache") is None


def test_an_interrupted_download_continues_with_the_shards_that_are_sound(tmp_path):
    run, folder = uploaded(tmp_path / "save")
    manifest = (folder / MANIFEST).read_bytes()
    cached = checkpoint_folder(URL, "global_step1", manifest, cache=str(tmp_path / "cache"))
    partial = folders.unfinished(cached / "global_step1")
    partial.mkdir(parents=True)
    shard = "shard-00000.safetensors"
    content = (folder / shard).read_bytes()
    for left, expected in ((content, 0), (content[:-8], 1), (content[:-1] + bytes([content[-1] ^ 1]), 1)):
        partial.mkdir(exist_ok=True)
        (partial / shard).write_bytes(left)
        fetched: list[str] = []

        class CountingStore(DyingStore):
            def download(self, name: str, path: Path, ranges: Any = None, fetched: Any = fetched) -> None:
                fetched.append(name)
                super().download(name, path, ranges)

        download(CountingStore(URL), "global_step1", manifest, cached)
        assert fetched == [f"global_step1/{shard}"] * expected
        assert (cached / "global_step1" / shard).read_bytes() == content
        folders.keep_newest(cached, 0, 1)
    assert loaded(URL, tmp_path / "cache").weights == run.weights


def test_a_folder_to_load_from_stays_as_it_is_while_others_download(tmp_path):
    run, _ = uploaded(tmp_path / "save")
    first = local_folder(URL, SINGLE_PROCESS, cache=str(tmp_path / "cache"), patience=0.0)
    uploaded(tmp_path / "save", updates=2)
    second = local_folder(URL, SINGLE_PROCESS, cache=str(tmp_path / "cache"), patience=0.0)
    assert second != first
    again = Run(layers=2)
    again.load(first)
    assert (again.iteration, again.weights) == (1, run.weights)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_damaged_download_is_repaired(tmp_path, caplog, is_cut):
    run, _ = uploaded(tmp_path / "save")
    cached = local_folder(URL, SINGLE_PROCESS, cache=str(tmp_path / "cache"), patience=0.0)
    shard = cached / "global_step1/shard-00000.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] if is_cut else content[:-1] + bytes([content[-1] ^ 1]))
    assert loaded(URL, tmp_path / "cache").weights == run.weights
    assert shard.read_bytes() == content
    assert "global_step1 is damaged" in caplog.text


class PartsStore(ObjectStore):
    """A store that counts the bytes of the parts of objects that are downloaded."""

    def __init__(self) -> None:
        super().__init__(URL, chunk_bytes=CHUNK, patience=0.0)
        self.received = 0

    def _part(self, name: str, first: int, stop: int) -> bytes:
        self.received += stop - first
        return super()._part(name, first, stop)


def weights_only(cache: Path) -> Path:
    folder = local_folder(URL, SINGLE_PROCESS, cache=str(cache), weights_only=True, patience=0.0)
    assert folder is not None
    return folder


def test_of_a_checkpoint_whose_states_are_not_read_only_the_weights_are_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "_JOINED_BYTES", 1_000)
    monkeypatch.setattr(object_store, "_REQUESTED_BYTES", 10_003)
    run = Run(width=5_000, layers=3)
    run.train()
    folder = run.save(tmp_path / "save")
    upload(folder, DyingStore(URL))
    store = PartsStore()
    monkeypatch.setattr(downloads, "_open", lambda url, patience: store)
    cached = weights_only(tmp_path / "cache")
    weights = 3 * 5_000 * 3 * 4
    assert weights < store.received < weights + 3_000
    assert (cached / "global_step1" / MANIFEST).read_bytes() == (folder / MANIFEST).read_bytes()
    again = Run(width=5_000, layers=3)
    again.load(cached, finetune=True)
    assert again.weights == run.weights
    # What is there is not downloaded again.
    received = store.received
    assert (weights_only(tmp_path / "cache"), store.received) == (cached, received)
    with refused(CheckpointError, "/exp_avg"):
        Run(width=5_000, layers=3).load(cached)
    whole = local_folder(URL, SINGLE_PROCESS, cache=str(tmp_path / "cache"), patience=0.0)
    assert whole != cached
    again.load(whole)
    assert (again.weights, again.states) == (run.weights, run.states)


@pytest.mark.parametrize("tensor", ["0", "0/exp_avg"])
def test_damage_in_the_store_is_found_in_what_is_downloaded(tmp_path, memory, monkeypatch, tensor):
    monkeypatch.setattr(downloads, "_JOINED_BYTES", 1)
    run, folder = uploaded(tmp_path / "save")
    [file] = Manifest.read(folder).files
    path = f"/bucket/run/global_step1/{file}"
    content = bytearray(memory.cat_file(path))
    first, _ = ShardFile(folder / file, len(content)).span(f"layers.{tensor}")
    content[first] ^= 1
    memory.pipe_file(path, bytes(content))
    with refused(CheckpointError, "downloaded 2", f"layers.{tensor}"):
        loaded(URL, tmp_path / "cache")
    if tensor == "0":
        with refused(CheckpointError, "2 times", "layers.0"):
            weights_only(tmp_path / "cache")
        return
    again = Run(layers=2)
    again.load(weights_only(tmp_path / "cache"), finetune=True)
    assert again.weights == run.weights


@pytest.mark.parametrize("left", [3, 100, -1])
def test_a_truncated_object_is_refused_by_its_size(tmp_path, memory, left):
    _, folder = uploaded(tmp_path / "save")
    [(file, size)] = Manifest.read(folder).files.items()
    path = f"/bucket/run/global_step1/{file}"
    memory.pipe_file(path, memory.cat_file(path)[:left])
    found = left if left > 0 else size + left
    with refused(CheckpointError, "2 times", f"{found:,} bytes"):
        weights_only(tmp_path / "cache")


def test_a_local_file_that_fails_is_neither_repeated_nor_an_error_of_the_store(tmp_path, caplog):
    store = ObjectStore(URL, chunk_bytes=CHUNK, patience=0.1)
    store.write("name", io.BytesIO(b"content"))
    with refused(OSError, "Invalid argument"):
        store.download("name", Path("/dev/full"))
    with pytest.raises(IsADirectoryError):
        store.download("name", tmp_path)

    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    with refused(CheckpointError, "Input/output"):
        store.write("name", Broken())
    assert caplog.messages == []


class PartsFile(AbstractBufferedFile):
    """A file of a store with buckets: it appears when it is committed."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs.sent += 1
        if self.fs.sent == self.fs.fails_at:
            raise OSError("unplugged")
        self.parts.append(self.buffer.getvalue())
        return True

    def commit(self) -> None:
        self.fs.objects[self.path] = self.parts

    def discard(self) -> None:
        self.fs.discarded += 1


class PartsSystem(fsspec.AbstractFileSystem):
    """A store with buckets, uploads in parts, and one failure."""

    cachable = False

    def __init__(self, *, fails_at: int = 0) -> None:
        super().__init__()
        self.objects: dict[str, list[bytes]] = {}
        self.sent, self.discarded, self.fails_at = 0, 0, fails_at

    def _open(self, path: str, mode: str = "rb", **options: Any) -> PartsFile:
        del options["cache_options"]
        return PartsFile(self, path, mode, **options)


def test_an_object_is_sent_in_parts_and_appears_when_all_are_there(monkeypatch):
    monkeypatch.setattr(object_store.time, "sleep", lambda seconds: None)
    content = bytes(range(256)) * 4096 * 12  # 12 MB
    store = ObjectStore(URL, chunk_bytes=CHUNK, patience=0.0)
    store._has_folders = False
    for patience, fails_at in ((0.0, 0), (0.0, 2), (0.5, 2)):
        store._patience, store._system = patience, PartsSystem(fails_at=fails_at)
        if fails_at and not patience:
            with refused(CheckpointError, "OSError: unplugged"):
                store.write("name", io.BytesIO(content))
            assert (store._system.objects, store._system.discarded) == ({}, 1)
            continue
        store.write("name", io.BytesIO(content))
        (parts,) = store._system.objects.values()
        assert b"".join(parts) == content
        assert all(len(part) >= CHUNK for part in parts[:-1])
        assert store._system.discarded == bool(fails_at)
    monkeypatch.setattr(object_store, "_MOST_PARTS", 1)
    store._patience, store._system = 0.0, PartsSystem()
    store.write("name", io.BytesIO(content))
    (parts,) = store._system.objects.values()
    assert [len(part) for part in parts if part] == [len(content)]


def test_an_absent_bucket_is_no_empty_store(tmp_path, monkeypatch):
    store = ObjectStore("memory://bucket/run", chunk_bytes=CHUNK, patience=0.0)
    assert object_store.latest_in(store) is None
    store._has_folders = False
    with refused(CheckpointError, "'bucket'"):
        object_store.latest_in(store)


def test_a_store_without_checkpoint_is_empty_whatever_was_downloaded_before(tmp_path, memory):
    uploaded(tmp_path / "save")
    assert loaded(URL, tmp_path / "cache") is not None
    memory.store.clear()
    assert loaded(URL, tmp_path / "cache") is None
    with refused(CheckpointError, "memory://bucket/run", code="no-checkpoint"):
        downloads.folder_with_weights(URL, SINGLE_PROCESS, cache=str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("latest", "problem"),
    [
        (None, "global_step1 into it"),
        (
            b"global_step7\n",
            "'global_step7', which is",
        ),
        (b"../other\n", "'../other', which is"),
        (b"\xff", "a complete checkpoint"),
    ],
)
def test_a_store_whose_latest_is_wrong_is_refused(tmp_path, memory, latest, problem):
    uploaded(tmp_path / "save")
    memory.rm_file(f"/bucket/run/{LATEST}")
    if latest is not None:
        memory.pipe_file(f"/bucket/run/{LATEST}", latest)
    with refused(CheckpointError, problem):
        loaded(URL, tmp_path / "cache")


def test_a_failing_operation_is_repeated_and_reported(monkeypatch, caplog):
    pauses: list[float] = []
    monkeypatch.setattr(object_store.time, "sleep", pauses.append)
    store = ObjectStore(URL, chunk_bytes=CHUNK, patience=4.0)
    store.write("name", io.BytesIO(b"content"))
    failures = [OSError("unplugged"), TimeoutError("slow")]

    def cat(path: str) -> bytes:
        if failures:
            raise failures.pop(0)
        return b"content"

    monkeypatch.setattr(store._system, "cat_file", cat)
    assert store.read("name") == b"content"
    assert pauses == [0.5, 1.0]
    assert caplog.messages == [
        f"reading {URL}/name failed: OSError: unplugged; trying again in 0.5 s",
        f"reading {URL}/name failed: TimeoutError: slow; trying again in 1 s",
    ]
    failures += [OSError("unplugged")] * 9
    with refused(CheckpointError, "memory://bucket/run/name"):
        store.read("name")
    assert pauses[2:] == [0.5, 1.0, 2.0, 0.5]
    failures[:] = [PermissionError("no key")] * 2
    with refused(CheckpointError, "PermissionError"):
        store.read("name")
    assert len(failures) == 1


def test_an_unknown_kind_of_store_names_what_is_missing():
    with refused(CheckpointError, code="not-openable"):
        ObjectStore("nothing://bucket", chunk_bytes=CHUNK)


def test_uploads_run_beside_the_training_and_the_last_one_is_waited_for(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    url = f"file://{tmp_path}/store"
    uploads = Uploads(tmp_path / "save", url, chunk_bytes=CHUNK, patience=0.0)
    runs = [saved(tmp_path / "save", updates=updates) for updates in (1, 2, 3)]
    for _, folder in runs:
        uploads.submit(folder)
    # The first one is being uploaded and the third one waits, so the second one is skipped.
    assert folders.marks_of_uploads(tmp_path / "save") == [tmp_path / "save/.global_step1.uploading"]
    folders.keep_newest(tmp_path / "save", 1, 3)
    assert [path.name for path in folders.complete_checkpoints(tmp_path / "save")] == [
        *("global_step1", "global_step3")
    ]
    uploads.finish()
    assert folders.marks_of_uploads(tmp_path / "save") == []
    messages = [each.getMessage() for each in caplog.records if each.name.endswith(".uploads")]
    assert messages[0].endswith("global_step2 is not uploaded: global_step3 is newer, and uploads are slower")
    assert [message.split(" in ")[0] for message in messages[1:]] == [
        f"uploaded global_step{step} to {url}" for step in (1, 3)
    ]
    assert loaded(url, tmp_path / "cache").weights == runs[2][0].weights
    assert not (tmp_path / "store/global_step2").exists()
    folders.keep_newest(tmp_path / "save", 1, 3)
    assert [path.name for path in folders.complete_checkpoints(tmp_path / "save")] == ["global_step3"]


def test_a_failed_upload_is_an_error_in_the_log_and_of_the_last_one_an_exception(tmp_path, caplog):
    (tmp_path / "store").write_text("a file")
    url = f"file://{tmp_path}/store"
    uploads = Uploads(tmp_path / "save", url, chunk_bytes=CHUNK, patience=0.0)
    _, folder = saved(tmp_path / "save")
    uploads.submit(folder)
    with refused(CheckpointError, "global_step1", "complete"):
        uploads.finish()
    (message,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert message.startswith(f"{folder} was not uploaded to {url}: ")
    (tmp_path / "store").unlink()
    run, folder = saved(tmp_path / "save", updates=2)
    uploads.submit(folder)
    uploads.finish()
    assert loaded(url, tmp_path / "cache").weights == run.weights


def test_an_upload_ends_with_the_process_that_started_it(tmp_path):
    (tmp_path / "store").write_text("a file, to which an upload fails until its patience ends")
    uploads = Uploads(tmp_path / "save", f"file://{tmp_path}/store", chunk_bytes=CHUNK, patience=600.0)
    _, folder = saved(tmp_path / "save")
    uploads.submit(folder)
    process = uploads._running
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # As the kernel does when the run is killed.
    assert process.wait(timeout=60) == 1
    uploads.close()
    assert folders.marks_of_uploads(tmp_path / "save") == []


def test_a_checkpoint_that_was_being_replaced_is_uploaded_under_its_name(tmp_path):
    run, folder = saved(tmp_path / "save")
    hidden = folder.rename(folder.with_name(".global_step1.replaced"))  # Between the two renames of a save.
    assert folders.find_latest(tmp_path / "save") == hidden
    assert folders.upload_mark(hidden) == folders.upload_mark(folder)
    upload(hidden, DyingStore(URL))
    found = loaded(URL, tmp_path / "cache")
    assert (found.iteration, found.weights) == (1, run.weights)


@pytest.mark.parametrize("failing", ["mark", "process"])
def test_an_upload_that_cannot_start_is_a_failed_upload(tmp_path, monkeypatch, caplog, failing):
    uploads = Uploads(tmp_path / "save", f"file://{tmp_path}/store", chunk_bytes=CHUNK, patience=0.0)
    _, folder = saved(tmp_path / "save")

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        if failing == "mark":
            context.setattr(Path, "touch", fail)
        else:
            context.setattr("neox_model.checkpoint.uploads.subprocess.Popen", fail)
        uploads.submit(folder)
    (message,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert message.endswith("its process cannot be started: [Errno 28] No space left on device")
    assert folders.marks_of_uploads(tmp_path / "save") == []
    with refused(CheckpointError, "No space left"):
        uploads.finish()
    uploads.submit(folder)
    with monkeypatch.context() as context:
        context.setattr(Path, "unlink", fail)
        uploads.finish()
    assert (tmp_path / "store" / LATEST).read_text() == "global_step1\n"


def test_signals_to_all_processes_of_a_job_do_not_end_an_upload(tmp_path):
    (tmp_path / "store").write_text("a file, to which an upload fails until it is deleted")
    uploads = Uploads(tmp_path / "save", f"file://{tmp_path}/store", chunk_bytes=CHUNK, patience=60.0)
    _, folder = saved(tmp_path / "save")
    uploads.submit(folder)
    assert uploads._running is not None
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        uploads._running.send_signal(number)
    (tmp_path / "store").unlink()
    uploads.finish()
    assert (tmp_path / "store" / LATEST).read_text() == "global_step1\n"


def test_closing_ends_the_upload_and_marks_of_a_killed_training_are_removed(tmp_path):
    _, folder = saved(tmp_path / "save")
    folders.upload_mark(folder).touch()
    uploads = Uploads(tmp_path / "save", f"file://{tmp_path}/store", chunk_bytes=CHUNK)
    assert folders.marks_of_uploads(tmp_path / "save") == []
    uploads.submit(folder)
    process = uploads._running
    uploads.close()
    assert process is not None
    assert process.returncode == -signal.SIGKILL
    assert folders.marks_of_uploads(tmp_path / "save") == []
    assert Manifest.read(folder).iteration == 1


def test_a_sound_download_is_used_while_another_process_holds_the_lock(tmp_path):
    run, folder = uploaded(tmp_path / "save")
    manifest = (folder / MANIFEST).read_bytes()
    assert loaded(URL, tmp_path / "cache") is not None
    cache = checkpoint_folder(URL, "global_step1", manifest, cache=str(tmp_path / "cache"))
    with folder_lock(cache, patience=0.0, use="downloads to"):
        found = loaded(URL, tmp_path / "cache")
    assert found.weights == run.weights


def test_an_upload_does_not_import_torch():
    command = "import sys, neox_model.checkpoint.upload; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], capture_output=True, text=True).stdout == "False\n"

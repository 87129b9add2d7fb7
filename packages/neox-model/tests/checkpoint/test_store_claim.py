"""Only one run uploads to a store, and it is found out at its start whether uploads are possible."""

import io
from pathlib import Path
from typing import Any

import pytest

from neox_config.facts.checkpoints import LATEST, MANIFEST
from neox_model.checkpoint.directory import keep_newest
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.object_store import ObjectStore
from neox_model.checkpoint.store_claim import OWNER, claim_store, warn_of_newer
from neox_model.checkpoint.upload import upload
from support.checkpoint_runs import Run
from support.refusals import refused, shows

pytestmark = pytest.mark.usefixtures("memory")
URL = "memory://bucket/run"


def store(url: str = URL) -> ObjectStore:
    return ObjectStore(url, chunk_bytes=5 * 2**20, patience=0.0)


def claim(save: Path, load: str | None = None, url: str = URL) -> str:
    save.mkdir(parents=True, exist_ok=True)
    return claim_store(url, save, load=load, patience=0.0)


def saved(folder: Path, updates: int = 1) -> Path:
    run = Run()
    for _ in range(updates):
        run.train()
    return run.save(folder)


def uploaded(folder: Path, updates: int = 1) -> Path:
    """Save and upload a checkpoint of a run that has claimed the store."""
    checkpoint = saved(folder, updates)
    upload(checkpoint, store(), owner=claim(folder))
    return checkpoint


def test_an_unrelated_training_is_refused_and_the_store_stays_as_it_is(tmp_path, memory):
    uploaded(tmp_path / "first")
    before = {name: memory.cat_file(name) for name in memory.find("/bucket")}
    saved(tmp_path / "second", 5)  # A newer checkpoint of the same name pattern changes nothing.
    for load in (None, str(tmp_path / "second"), "memory://bucket/other"):
        with refused(CheckpointError, "global_step1", URL, code="store-of-another"):
            claim(tmp_path / "second", load)
    assert {name: memory.cat_file(name) for name in memory.find("/bucket")} == before
    assert not (tmp_path / "second" / OWNER).exists()


@pytest.mark.parametrize("load", [URL, f"{URL}/", "first", "copy"])
def test_the_training_that_continues_the_checkpoint_of_the_store_may_upload(tmp_path, load):
    folder = uploaded(tmp_path / "first")
    if load == "copy":
        (tmp_path / "copy").mkdir()
        folder.rename(tmp_path / "copy" / folder.name)
        (tmp_path / "copy" / LATEST).write_text(folder.name)
    claim(tmp_path / "another", load if "://" in load else str(tmp_path / load))


def test_the_same_training_goes_on_whatever_it_has_deleted_since(tmp_path):
    uploaded(tmp_path / "save")
    saved(tmp_path / "save", 2)
    keep_newest(tmp_path / "save", 1, 2)
    assert not (tmp_path / "save/global_step1").exists()
    claim(tmp_path / "save")
    # Without its number, which an earlier version did not write, the checkpoint decides.
    (tmp_path / "save" / OWNER).unlink()
    with refused(CheckpointError, code="store-of-another"):
        claim(tmp_path / "save")
    saved(tmp_path / "save")
    upload(tmp_path / "save/global_step1", store())
    claim(tmp_path / "save")


def test_of_two_trainings_that_start_together_only_the_later_one_uploads(tmp_path, memory):
    first, second = claim(tmp_path / "first"), claim(tmp_path / "second")
    with refused(CheckpointError, "memory://bucket/run", code="other-claim"):
        upload(saved(tmp_path / "first"), store(), owner=first)
    assert memory.find("/bucket") == [f"/bucket/run/{OWNER}"]
    upload(saved(tmp_path / "second", 2), store(), owner=second)
    assert store().read(LATEST) == b"global_step2\n"


def test_a_deleted_claim_is_not_reported_as_another_training(tmp_path, memory):
    owner = claim(tmp_path / "save")
    memory.rm_file(f"/bucket/run/{OWNER}")
    with refused(CheckpointError, "memory://bucket/run/.owner", code="lost-claim"):
        upload(saved(tmp_path / "save"), store(), owner=owner)


def test_a_start_without_a_usable_store_fails_with_what_to_do(tmp_path):
    with refused(CheckpointError, "URL", code="store-of-another"):
        claim(tmp_path / "save", url="nothing://bucket")
    (tmp_path / "store").write_text("a file")
    with refused(CheckpointError, code="store-of-another"):
        claim(tmp_path / "save", url=f"file://{tmp_path}/store")
    store().write(LATEST, io.BytesIO(b"global_step7\n"))
    with refused(CheckpointError, "'global_step7'", code="store-of-another"):
        claim(tmp_path / "save")


def test_a_bucket_is_looked_up_without_listing_it(tmp_path, monkeypatch, memory):
    asked = []
    monkeypatch.setattr(type(memory), "info", lambda self, path, **options: asked.append(path))
    checked = store()
    checked._has_folders = False
    checked.check_bucket()
    assert asked == ["bucket"]


def test_a_newer_checkpoint_in_save_than_in_the_store_is_a_warning(tmp_path, caplog):
    saved(tmp_path, 3)
    warn_of_newer(tmp_path, URL, 3)
    assert caplog.messages == []
    warn_of_newer(tmp_path, URL, 2)
    assert shows(caplog.text, tmp_path, "global_step3")
    assert f"load: {tmp_path}" in caplog.text
    assert (tmp_path / "global_step3" / MANIFEST).exists()


def test_a_start_that_was_killed_while_it_claimed_the_store_can_be_repeated(tmp_path, monkeypatch):
    """Before or after the number is written to the store, whose checkpoint `save` no longer contains."""
    uploaded(tmp_path / "save")
    saved(tmp_path / "save", 2)
    keep_newest(tmp_path / "save", 1, 2)
    write = ObjectStore.write
    for is_late in (False, True, False, False):

        def killed(self: ObjectStore, name: str, source: Any, is_late: bool = is_late) -> None:
            if is_late:
                write(self, name, source)
            raise KeyboardInterrupt

        with monkeypatch.context() as patches:
            patches.setattr(ObjectStore, "write", killed)
            with pytest.raises(KeyboardInterrupt):
                claim(tmp_path / "save")
    number = claim(tmp_path / "save")
    assert store().read(OWNER) == number.encode()
    (tmp_path / "other").mkdir()
    with refused(CheckpointError, code="store-of-another"):
        claim(tmp_path / "other")


def test_an_upload_ends_when_another_training_claims_the_store_meanwhile(tmp_path, memory, monkeypatch):
    first, number = saved(tmp_path / "first"), claim(tmp_path / "first")
    write = ObjectStore.write

    def claimed_meanwhile(self: ObjectStore, name: str, source: Any) -> None:
        write(self, name, source)
        if name.endswith(".safetensors"):
            monkeypatch.setattr(ObjectStore, "write", write)
            claim(tmp_path / "second")

    monkeypatch.setattr(ObjectStore, "write", claimed_meanwhile)
    with refused(CheckpointError, code="other-claim"):
        upload(first, store(), owner=number)
    assert not memory.exists(f"/bucket/run/{first.name}/{MANIFEST}")
    assert store().read(LATEST) is None

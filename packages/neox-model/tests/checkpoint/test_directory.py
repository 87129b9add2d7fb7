import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from neox_config.facts.checkpoints import MANIFEST, checkpoint_name, complete_checkpoints
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint.errors import CheckpointError
from support.refusals import refused, shows


def save(directory, iteration, text="complete"):
    final = directory / checkpoint_name(iteration)
    temporary = folders.unfinished(final)
    folders.begin(temporary)
    (temporary / MANIFEST).write_text(text)
    folders.publish(temporary, final)
    return final


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_latest_names_the_last_published_checkpoint(tmp_path):
    directory = tmp_path / "not" / "there"
    assert folders.find_latest(directory) is None
    for iteration in (5, 10):
        assert folders.find_latest(directory) != save(directory, iteration)
        assert folders.find_latest(directory) == directory / f"global_step{iteration}"
    assert (directory / "latest").read_text() == "global_step10\n"
    assert names(directory) == ["global_step10", "global_step5", "latest"]


def test_a_user_may_go_back_by_editing_latest(tmp_path):
    first = save(tmp_path, 5)
    save(tmp_path, 10)
    (tmp_path / "latest").write_text("global_step5")
    assert folders.find_latest(tmp_path) == first


def test_an_unfinished_checkpoint_is_invisible_and_the_next_save_removes_it(tmp_path):
    save(tmp_path, 5)
    for leftover in (".global_step10.saving", ".global_step3.deleted"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / MANIFEST).write_text("half")
    assert complete_checkpoints(tmp_path) == [tmp_path / "global_step5"]
    save(tmp_path, 10)
    assert names(tmp_path) == ["global_step10", "global_step5", "latest"]


def test_a_checkpoint_of_the_same_iteration_is_replaced(tmp_path):
    save(tmp_path, 5, "old")
    final = save(tmp_path, 5, "new")
    assert (final / MANIFEST).read_text() == "new"
    assert names(tmp_path) == ["global_step5", "latest"]


def test_old_checkpoint_is_used_after_a_kill_between_the_two_renames(tmp_path):
    save(tmp_path, 5, "old")
    (tmp_path / "global_step5").rename(tmp_path / ".global_step5.replaced")
    assert folders.find_latest(tmp_path) == tmp_path / ".global_step5.replaced"
    save(tmp_path, 10)
    assert names(tmp_path) == ["global_step10", "global_step5", "latest"]


def test_the_folder_of_one_checkpoint_is_that_checkpoint(tmp_path):
    first, _ = save(tmp_path, 5), save(tmp_path, 9)
    assert folders.find_latest(first) == first
    assert folders.find_latest(tmp_path).name == "global_step9"


def test_complete_checkpoint_is_used_and_logged_if_latest_is_missing(tmp_path, caplog):
    save(tmp_path, 5)
    (tmp_path / "latest").unlink()
    with caplog.at_level(logging.WARNING):
        assert folders.find_latest(tmp_path) == tmp_path / "global_step5"
    assert "global_step5" in caplog.text


@pytest.mark.parametrize("content", ["global_step7", "../elsewhere", "", "release"])
def test_latest_that_names_nothing_is_an_error_with_an_offer(tmp_path, content):
    save(tmp_path, 5)
    (tmp_path / "latest").write_text(content)
    with refused(CheckpointError, "global_step5", code="no-such-checkpoint"):
        folders.find_latest(tmp_path)


def test_keep_newest_counts_from_the_checkpoint_just_saved(tmp_path):
    for iteration in (2, 4, 6, 100):
        save(tmp_path, iteration)
    folders.keep_newest(tmp_path, 2, 6)
    assert names(tmp_path) == ["global_step100", "global_step4", "global_step6", "latest"]


@pytest.mark.parametrize(
    ("damaged", "offered"),
    [("global_step5", "global_step3"), (".global_step5.replaced", "global_step3"), ("copy", "global_step7")],
)
def test_an_earlier_one_is_offered_whatever_the_name_of_the_damaged_one(tmp_path, damaged, offered):
    for iteration in (3, 5, 7):
        save(tmp_path, iteration)
    text = folders.offer_earlier(tmp_path, tmp_path / damaged)
    assert text.endswith(f"run: echo {offered} > {tmp_path / 'latest'}")
    alone = folders.offer_earlier(tmp_path, tmp_path / "global_step3")
    assert alone.endswith(
        "no earlier complete checkpoint: without a copy of its files, train anew with load, "
        "save and log-dir set to other folders"
    )


def test_latest_with_too_many_digits_is_an_error(tmp_path):
    (tmp_path / "latest").write_text("global_step" + "1" * 5000)
    with refused(CheckpointError, code="no-such-checkpoint"):
        folders.find_latest(tmp_path)


@pytest.mark.parametrize("latest", [True, False])
@pytest.mark.parametrize("file", ["layer_00-model_00-model_states.pt", "mp_rank_00_model_states.pt"])
def test_a_checkpoint_of_gpt_neox_is_refused_with_the_command_that_converts_it(tmp_path, latest, file):
    theirs = tmp_path / "global_step10"
    theirs.mkdir()
    (theirs / file).touch()
    if latest:
        (tmp_path / "latest").write_text("global_step10")
    command = f"neox-convert from-neox {theirs} --output imported"
    with refused(CheckpointError, theirs, "GPT-NeoX", command, code="gpt-neox-checkpoint"):
        folders.find_latest(tmp_path)
    with refused(CheckpointError, theirs, "GPT-NeoX", code="gpt-neox-checkpoint"):
        folders.find_latest(theirs)


def test_one_of_ours_next_to_those_of_gpt_neox_is_found(tmp_path):
    (tmp_path / "global_step10").mkdir()
    (tmp_path / "global_step10" / "mp_rank_00_model_states.pt").touch()
    ours = save(tmp_path, 20)
    assert folders.find_latest(tmp_path) == ours


def test_a_link_to_a_checkpoint_is_deleted_and_what_it_names_is_kept(tmp_path):
    directory = tmp_path / "saved"
    save(directory, 5)
    (directory / "global_step5").rename(tmp_path / "elsewhere")
    (directory / "global_step5").symlink_to("../elsewhere")
    save(directory, 10)
    folders.keep_newest(directory, 1, 10)
    assert names(directory) == ["global_step10", "latest"]
    assert (tmp_path / "elsewhere" / MANIFEST).read_text() == "complete"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("iteration", [5, 10])
def test_what_cannot_be_deleted_is_a_warning_and_blocks_no_save(
    tmp_path, monkeypatch, caplog, when, iteration
):
    """Iteration 5 replaces a checkpoint, 10 is new and deletes an old one."""
    delete = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: os.stat(path / "none"))
    save(tmp_path, 5, "old")
    if when == "before":
        # What a process left that was killed, of each kind, and with the names that a save uses.
        for name in (".global_step5.deleted", f".global_step{iteration}.saving", ".global_step3.replaced"):
            (tmp_path / name).mkdir()
        (tmp_path / "global_step3").mkdir()
    for _ in range(3):
        final = save(tmp_path, iteration, "new")
        folders.keep_newest(tmp_path, 1, iteration)
        assert (final / MANIFEST).read_text() == "new"
        assert (tmp_path / "latest").read_text() == f"global_step{iteration}\n"
        assert complete_checkpoints(tmp_path) == [final]
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings
    assert len(warnings) == len(set(warnings))
    monkeypatch.setattr(shutil, "rmtree", delete)
    save(tmp_path, 20)
    assert [name for name in names(tmp_path) if name.startswith(".")] == []


def test_a_protected_checkpoint_is_kept_whole(tmp_path, monkeypatch, caplog):
    save(tmp_path, 5)
    protected = tmp_path / "global_step5" / MANIFEST
    monkeypatch.setattr(os, "access", lambda path, mode: path != protected)
    for iteration in (10, 15):
        save(tmp_path, iteration)
        folders.keep_newest(tmp_path, 1, iteration)
    assert names(tmp_path) == ["global_step15", "global_step5", "latest"]
    (text,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert shows(text, tmp_path / "global_step5", "write-protected")


@pytest.mark.parametrize("kind", ["file", "folder", "link", "pipe"])
@pytest.mark.parametrize(
    "name", ["global_step10", "latest", ".global_step10.saving", ".global_step10.replaced"]
)
def test_foreign_things_with_names_of_ours_block_no_save(tmp_path, name, kind):
    foreign = tmp_path / name
    if kind == "file":
        foreign.write_text("mine")
    elif kind == "folder":
        foreign.mkdir()
        (foreign / "mine").write_text("mine")
    elif kind == "pipe":
        os.mkfifo(foreign)
    else:
        foreign.symlink_to("nowhere")
    final = save(tmp_path, 10)
    assert folders.find_latest(tmp_path) == final
    visible = ["global_step10", "latest"]
    if name == "global_step10" or (name == "latest" and kind in ("folder", "pipe")):
        visible.append(f"{name}.other")
    assert names(tmp_path) == sorted(visible)


@pytest.fixture
def folder_of_user():
    """A folder of a user who is not root, whom the test runs as."""
    unprivileged, is_root = 65534, os.getuid() == 0
    with tempfile.TemporaryDirectory() as name:
        if is_root:
            os.chown(name, unprivileged, unprivileged)
            os.setresuid(unprivileged, unprivileged, 0)
        try:
            yield Path(name)
        finally:
            if is_root:
                os.setresuid(0, 0, 0)


@pytest.mark.parametrize("kind", ["name", "saving", "replaced", "deleted"])
def test_a_folder_that_cannot_be_read_blocks_no_save_and_no_deletion_of_others(folder_of_user, kind):
    name = {"name": "global_step10"}.get(kind, f".global_step10.{kind}")
    for iteration in (5, 6):
        save(folder_of_user, iteration)
    foreign = folder_of_user / name
    foreign.mkdir()
    (foreign / "mine").write_text("mine")
    foreign.chmod(0o000)
    final = save(folder_of_user, 10)
    assert folders.find_latest(folder_of_user) == final
    (folder_of_user / "global_step4").mkdir(0o000)
    folders.keep_newest(folder_of_user, 2, 10)
    assert [path.name for path in folder_of_user.glob("global_step[56]")] == ["global_step6"]

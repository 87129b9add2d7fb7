"""Checkpoints on the local disks of several hosts. A host is a folder, the working directory of its ranks."""

import os
import shutil
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from neox_config.facts.checkpoints import LATEST, MANIFEST, complete_checkpoints
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint import load, local_shards
from neox_model.checkpoint import storage as storage_module
from neox_model.checkpoint.background import BackgroundSaves
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.local_shards import Copy, Inventory, agree_on_checkpoint, choose
from neox_model.checkpoint.storage import Storage, find_storage, refuse_shared_folder, save_lock
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK
from neox_model.parallel.topology import create_groups
from support.checkpoint_runs import Run
from support.distributed import run_ranks
from support.refusals import refused, shows
from support.settings import SMALL_TRAINING, resolved_from

SAVE = Path("save")
HOSTS = ("A", "A", "B", "B")
ONE_HOST = Storage(("A",), 0, is_local=True)


def trained() -> Run:
    run = Run(layers=2, storage=ONE_HOST)
    run.train()
    return run


def contents() -> dict[str, list[str]]:
    """Return the files of this host's checkpoints, and what `latest` names, when all ranks are here."""
    torch.distributed.barrier()
    found = {path.name: sorted(each.name for each in path.iterdir()) for path in complete_checkpoints(SAVE)}
    return found | {LATEST: [(SAVE / LATEST).read_text().strip()]} if found else found


def enter_host(folder: str, hosts: tuple[str, ...]) -> Storage:
    from torch import distributed

    rank = distributed.get_rank()
    home = Path(folder) / hosts[rank]
    home.mkdir(parents=True, exist_ok=True)
    os.chdir(home)
    return Storage(hosts, rank, is_local=True)


def run_on(storage: Storage, groups: Any, *, updates: int = 0) -> Run:
    """Return the same state on every rank: they are replicas, each of which writes some of the layers."""
    torch.manual_seed(1)
    run = Run(layers=8, groups=groups, storage=storage)
    for _ in range(updates):
        run.train()
    return run


def loaded(storage: Storage, groups: Any) -> list[Any]:
    """Load as a run does; return the iteration, weights and states."""
    torch.manual_seed(9)
    agree_on_checkpoint(SAVE, storage, groups.control)
    run = Run(layers=8, groups=groups, storage=storage)
    run.load(SAVE)
    return [run.iteration, run.weights, run.states]


def error_of(action: Any) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return "no error"


def live_on_two_hosts(folder: str) -> dict[str, Any]:
    """Save, load and lose checkpoints; return what this rank saw, by name."""
    groups, seen = create_groups(1, 1), {}
    storage = enter_host(folder, HOSTS)
    first = run_on(storage, groups, updates=1)
    first.save(SAVE, keep_last=1)
    run = run_on(storage, groups, updates=2)
    run.save(SAVE, keep_last=1)
    seen["saved"] = contents()

    # The other host renames its folder, this one cannot: the checkpoint is visible on none.
    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    run.train()
    place = folders.place
    with patch.object(folders, "place", fail if storage.name == "B" else place):
        seen["failed"] = error_of(lambda: run.save(SAVE, keep_last=1))
    seen["after the failure"] = contents(), sorted(path.name for path in SAVE.glob(".*"))
    torch.distributed.barrier()

    saves = BackgroundSaves(groups, torch.device("cpu"), patience=60.0)
    saves.start(SAVE, run._parts(), iteration=run.iteration, config=run.config)
    while saves.iteration is not None:
        saves.proceed()
        time.sleep(0.005)
    saves.close()
    seen["in the background"] = contents()
    expected = [run.iteration, run.weights, run.states]

    # Killed when only one host had changed `latest`.
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 2:
        (SAVE / LATEST).write_text("global_step2\n")
    torch.distributed.barrier()
    before = contents()
    if storage.name == "A":
        shutil.copytree(SAVE, "copy", dirs_exist_ok=True) if storage.leads else None
    seen["resumed"] = loaded(storage, groups) == expected
    seen["before and after the load"] = before, contents()

    # Two further hosts, with nothing on their disks.
    torch.distributed.barrier()
    alone = enter_host(folder, ("A", "C", "B", "D"))
    seen["on four hosts"] = loaded(alone, groups) == expected

    # Host B has lost its disk, and no other host has copies.
    storage = enter_host(folder, HOSTS)
    torch.distributed.barrier()
    if storage.leads:
        shutil.rmtree(SAVE)
        if storage.name == "A":
            Path("copy").rename(SAVE)
    torch.distributed.barrier()
    seen["lost"] = error_of(lambda: loaded(storage, groups))
    os.chdir(folder)
    storage = Storage(HOSTS, storage.rank, is_local=True)

    def lock() -> None:
        with save_lock(Path("one folder"), groups, storage=storage):
            pass

    seen["shared"] = error_of(lock)
    return seen


@pytest.mark.slow
def test_two_hosts_save_and_load_what_each_has_alone(tmp_path):
    ranks = run_ranks(live_on_two_hosts, size=4, folder=str(tmp_path), timeout_seconds=900)
    a, b = ranks[0], ranks[2]
    assert ranks[1] == a
    assert ranks[3] == b
    shards = [f"shard-{rank:05d}.safetensors" for rank in range(4)]
    for host, held in ((a, shards[:2]), (b, shards[2:])):
        assert host["saved"] == {"global_step2": [MANIFEST, *held], LATEST: ["global_step2"]}
        assert host["after the failure"] == [host["saved"], []]
        assert host["in the background"][LATEST] == ["global_step3"]
        assert host["in the background"]["global_step3"] == [MANIFEST, *held]
        before, after = host["before and after the load"]
        assert before["global_step3"] == [MANIFEST, *held]
        # Every rank is a replica, and reads all layers, but not the random states of other ranks.
        assert after["global_step3"] == [MANIFEST, *shards]
        assert after[LATEST] == ["global_step3"]
        assert host["resumed"]
        assert host["on four hosts"]
        assert shows(host["failed"], "save/global_step3", "rank 2", "28")
        assert shows(host["lost"], "save/global_step3", "shard-00002")
        assert "B has nothing" in host["lost"]
        assert "on several hosts" in host["shared"]


NEEDED = frozenset({"0", "1"})


def inventory(host: str, latest: str | None, **copies: str) -> Inventory:
    """Describe a host: by checkpoint, the shards that it has."""
    held = {(name, "digest"): Copy(name, NEEDED, frozenset(files)) for name, files in copies.items()}
    return Inventory(host, latest, held)


def test_the_newest_named_checkpoint_is_chosen_only_if_all_shards_exist():
    first = inventory("A", "global_step4", global_step2="0", global_step4="0")
    assert choose(SAVE, [inventory("A", None), inventory("B", None)]) is None
    second = inventory("B", "global_step2", global_step2="1", global_step4="1")
    assert choose(SAVE, [first, second]) == ("global_step4", "digest")
    # All hosts went back.
    back = [
        inventory(host, "global_step2", global_step2=files, global_step4=files)
        for host, files in ("A0", "B1")
    ]
    assert choose(SAVE, back) == ("global_step2", "digest")
    with refused(CheckpointError, "has 1", "B has nothing"):
        choose(SAVE, [first, inventory("B", "global_step2", global_step2="1")])
    with refused(CheckpointError, "has 0", "A has nothing"):
        choose(SAVE, [inventory("A", None), inventory("B", "global_step2", global_step2="1")])


def test_a_checkpoint_of_another_training_with_the_same_name_is_not_mixed_in(tmp_path):
    first, second = (
        inventory("A", "global_step4", global_step4="0"),
        inventory("B", "global_step4", global_step4="1"),
    )
    other = Inventory(
        "B", "global_step4", {("global_step4", "other"): Copy("global_step4", NEEDED, frozenset("1"))}
    )
    assert choose(SAVE, [first, second]) == ("global_step4", "digest")
    with refused(CheckpointError, "global_step4", "1"):
        choose(SAVE, [first, other])


def test_a_manifest_is_the_same_whichever_ranks_share_a_folder(tmp_path):
    run = trained()
    assert Manifest.read(run.save(tmp_path)).iteration == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", LATEST]


def test_a_save_that_fails_on_another_host_restores_the_checkpoint_that_it_was_replacing(tmp_path):
    """Whether it failed here or there, and before or after the rename."""
    run = trained()
    old = run.save(tmp_path)
    content = {path.name: path.read_bytes() for path in old.iterdir()}

    def save_failing(name: str, *, is_late: bool) -> None:
        function = getattr(folders, name)

        def fail(*arguments: Any) -> None:
            if is_late:
                function(*arguments)
            raise OSError(28, "No space left on device")

        again = trained()
        with patch.object(folders, name, fail), refused(CheckpointError, "No space left"):
            again.save(tmp_path)

    for name, is_late in (("place", False), ("flush_folder", True), ("flush_folder", False)):
        save_failing(name, is_late=is_late)
        assert {path.name: path.read_bytes() for path in old.iterdir()} == content
        assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", LATEST]


def test_a_damaged_manifest_of_another_checkpoint_does_not_stop_a_load(tmp_path, caplog):
    run = trained()
    (run.save(tmp_path) / MANIFEST).write_text("damaged")
    run.train()
    run.save(tmp_path)
    agree_on_checkpoint(tmp_path, ONE_HOST, SINGLE_RANK)
    assert shows(caplog.text, "global_step1")
    (tmp_path / "global_step2" / MANIFEST).write_text("damaged")
    with refused(CheckpointError, "global_step2", "A has nothing"):
        agree_on_checkpoint(tmp_path, ONE_HOST, SINGLE_RANK)


def copy_onto_a_folder(folder: str) -> str:
    """Copy a shard to a host where its name is that of a folder, so that it cannot be renamed."""
    storage = enter_host(folder, ("A", "B"))
    groups = create_groups(1, 1)
    Path("shard").write_bytes(b"12") if storage.name == "A" else Path("shard", "below").mkdir(parents=True)
    error = error_of(
        lambda: local_shards._copy(Path("shard"), 2, 0, [1], storage, groups.control),
    )
    assert storage.name == "A" or [each.name for each in Path().iterdir()] == ["shard"]
    return error


def test_a_copy_that_cannot_be_renamed_is_the_same_error_on_all_ranks(tmp_path):
    [error] = set(run_ranks(copy_onto_a_folder, size=2, folder=str(tmp_path)))
    assert "on rank 1" in error


def test_marks_of_killed_starts_are_deleted(tmp_path):
    (tmp_path / ".host-0-0123abcd").touch()
    refuse_shared_folder(tmp_path, ONE_HOST, SINGLE_RANK)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_a_host_that_cannot_be_created_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with refused(CheckpointError, "save", "each host"):
            refuse_shared_folder(folder, ONE_HOST, SINGLE_RANK)


def test_two_hosts_of_one_name_are_refused():
    """Otherwise the second would wait for a folder that the first one creates on its own disk."""
    settings = SMALL_TRAINING | {"checkpoint": {"use_node_local_storage": True}}
    section = resolved_from(settings).config.checkpoint
    for places, error in (
        ([("A", 0), ("A", 1), ("B", 0)], None),
        ([("A", 0), ("B", 0), ("A", 0)], "named A"),
    ):
        with patch.object(storage_module, "all_gather_object", lambda *_, places=places: places):
            if error is None:
                assert find_storage(section, SINGLE_PROCESS).names == ("A", "A", "B")
            else:
                with refused(CheckpointError, error):
                    find_storage(section, SINGLE_PROCESS)


def half_deleted(directory: Path) -> Path:
    """Save the same state twice, with a process that dies while it deletes the first checkpoint."""
    run = trained()
    final = run.save(directory)
    replaced = directory / ".global_step1.replaced"
    shutil.copytree(final, replaced)
    for shard in replaced.glob("*.safetensors"):
        shard.unlink()
    return final


def test_a_rest_of_a_checkpoint_that_was_replaced_by_an_equal_one_does_not_stop_a_load(tmp_path):
    final = half_deleted(tmp_path)
    content = {path.name: path.read_bytes() for path in final.iterdir()}
    agree_on_checkpoint(tmp_path, ONE_HOST, SINGLE_RANK)
    assert {path.name: path.read_bytes() for path in final.iterdir()} == content


def test_hosts_that_share_a_folder_do_not_delete_what_the_other_one_has_restored(tmp_path):
    run = trained()
    final = run.save(tmp_path)
    final.rename(tmp_path / ".global_step1.replaced")
    found = local_shards._inventory(tmp_path, "A")
    [chosen] = found.copies
    manifest = (tmp_path / ".global_step1.replaced" / MANIFEST).read_text()
    for _ in range(2):
        local_shards._install(tmp_path, chosen, manifest, found)
    assert sorted(path.name for path in final.iterdir()) == [MANIFEST, "shard-00000.safetensors"]


def test_a_reader_does_not_change_what_a_training_has_announced_since(tmp_path):
    run = trained()
    run.save(tmp_path)
    found = local_shards._inventory(tmp_path, "A")
    [chosen] = found.copies
    run.train()
    run.save(tmp_path)
    local_shards._install(tmp_path, chosen, "unused", found)
    assert (tmp_path / LATEST).read_text() == "global_step2\n"


def test_a_damaged_shard_on_several_hosts_offers_to_go_back_on_each(tmp_path):
    run = Run(layers=2, storage=ONE_HOST)
    for _ in range(2):
        run.train()
        final = run.save(tmp_path)
    shard = final / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    again = Run(layers=2, storage=ONE_HOST)
    with refused(CheckpointError, "global_step1"):
        again.load(tmp_path)
    again.storage = Storage(("A", "B"), 0, is_local=True)
    with (
        patch.object(load, "copy_missing", lambda *_: None),
        refused(CheckpointError, "global_step1"),
    ):
        again.load(tmp_path)

"""Random failures while checkpoints are saved, stored and uploaded: what is left is always what was saved.

After every round, `latest` names a checkpoint that loads with the bits of its iteration, at least as new as
the last save that succeeded; a save that fails is an exception; a damaged checkpoint is refused, and the
remedy of the message leads to the previous one.
"""

import contextlib
import logging
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from neox_config.facts.checkpoints import LATEST, MANIFEST, complete_checkpoints, iteration_of
from neox_model.checkpoint import writer_process
from neox_model.checkpoint.background import BackgroundSaves
from neox_model.checkpoint.directory import find_latest
from neox_model.checkpoint.downloads import local_folder
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.uploads import Uploads
from neox_model.parallel.groups import SINGLE_PROCESS
from support.checkpoint_runs import Run

pytestmark = pytest.mark.slow

DEADLINE_SECONDS = 120.0
KEPT = 3


class World:
    """A run, its folder of checkpoints, a store, and the bits of every iteration that was saved."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disk, self.save, self.store = folder / "disk", folder / "disk" / "save", folder / "store"
        self.cache = folder / "cache"
        self.save.mkdir(parents=True)
        torch.manual_seed(seed)
        self.run = Run(layers=3)
        self.saves = BackgroundSaves(SINGLE_PROCESS, torch.device("cpu"), patience=DEADLINE_SECONDS)
        self.url = f"file://{self.store}"
        self.uploads = Uploads(self.save, self.url, chunk_bytes=5 * 2**20, patience=0.0)
        self.bits: dict[int, list[object]] = {}
        self.newest = 0
        self.seen: Counter[str] = Counter()

    def train(self) -> None:
        self.run.train()
        assert self.run.iteration is not None
        self.bits[self.run.iteration] = [self.run.weights, self.run.states]

    def try_to_save(self, during: Callable[[], None] = lambda: None) -> str | None:
        """Save in the background; return the error, None if it succeeded."""
        run = self.run
        try:
            self.saves.start(
                self.save, run._parts(), iteration=run.iteration, config=run.config, keep_last=KEPT
            )
            during()
            deadline = time.monotonic() + DEADLINE_SECONDS
            while self.saves.iteration is not None:
                self.saves.proceed()
                assert time.monotonic() < deadline
                time.sleep(0.001)
        except CheckpointError as error:
            self.saves.settle()
            return str(error)
        assert run.iteration is not None
        self.newest = run.iteration
        return None

    def check(self) -> None:
        """Load what `latest` names, and compare it with what was saved."""
        folder = find_latest(self.save)
        if folder is None:
            assert self.newest == 0
            return
        found = Run(layers=3)
        found.load(self.save)
        assert [found.weights, found.states] == self.bits[found.iteration]
        assert found.iteration >= self.newest
        assert not list(self.save.glob(".*.saving"))


def killed_writer(world: World) -> str | None:
    return world.try_to_save(lambda: writer_of(world).send_signal(signal.SIGKILL))


def stuck_writer(world: World) -> str | None:
    with patch.object(world.saves, "_patience", 0.5):
        return world.try_to_save(lambda: writer_of(world).send_signal(signal.SIGSTOP))


def writer_of(world: World) -> "subprocess.Popen[bytes]":
    time.sleep(world.chance.uniform(0.0, 0.1))
    return world.saves._stage._process  # type: ignore[union-attr]


def full_disk(world: World) -> str | None:
    """No file of a writer may be larger than a part of the shard."""
    begin, size = writer_process._start, world.chance.randrange(1, 2000)

    def start_limited(*arguments: object) -> "subprocess.Popen[bytes]":
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            return begin(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with patch.object(writer_process, "_start", start_limited):
        return world.try_to_save()


def lost_folder(world: World) -> str | None:
    """The unfinished checkpoint is deleted while it is written."""
    hidden = world.save / f".global_step{world.run.iteration}.saving"

    def delete() -> None:
        time.sleep(world.chance.uniform(0.0, 0.1))
        shutil.rmtree(hidden, ignore_errors=True)

    return world.try_to_save(delete)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder read-only, for root as well: it is mounted."""
    subprocess.run(["mount", "--bind", folder, folder], check=True, capture_output=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True, capture_output=True)
        yield
    finally:
        subprocess.run(["umount", folder], check=True, capture_output=True)


def read_only_folder(world: World) -> str | None:
    with read_only(world.save):
        return world.try_to_save()


def no_failure(world: World) -> str | None:
    error = world.try_to_save()
    assert error is None, error
    return None


SAVES = {
    "killed writer": killed_writer,
    "stuck writer": stuck_writer,
    "full disk": full_disk,
    "lost folder": lost_folder,
    "read-only folder": read_only_folder,
    "no failure": no_failure,
}


def truncated(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def flipped(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def removed(path: Path, chance: random.Random) -> None:
    path.unlink()


DAMAGES = {"truncated": truncated, "flipped": flipped, "removed": removed}


def damage(world: World) -> None:
    """Damage a file of the newest checkpoint; follow the remedy of the message if it is refused."""
    complete = complete_checkpoints(world.save)
    if len(complete) < 2:
        return
    # With no manifest, a folder is no checkpoint: `latest` is then wrong.
    # An earlier damage may have removed `latest`.
    files = [*complete[-1].iterdir(), world.save / LATEST]
    path = world.chance.choice([file for file in files if file.exists()])
    kind = world.chance.choice(list(DAMAGES))
    DAMAGES[kind](path, world.chance)
    found = Run(layers=3)
    try:
        found.load(world.save)
    except CheckpointError as error:
        world.seen[f"{kind} and refused"] += 1
        (command,) = re.findall(r"run: (echo global_step\d+ > \S+)$", str(error))
        _, name, _, latest = shlex.split(command)
        assert Path(latest) == world.save / LATEST
        (world.save / LATEST).write_text(name + "\n")
        found.load(world.save)
        # What is damaged would be offered again, and counted by `keep_last_n_checkpoints`.
        for each in world.save.glob("global_step*"):
            if iteration_of(each.name) > found.iteration:
                shutil.rmtree(each)
    else:
        world.seen[f"{kind} without effect"] += 1
    assert [found.weights, found.states] == world.bits[found.iteration]
    world.newest = found.iteration


def upload(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Upload the latest checkpoint while the store may be away; compare what the store has."""
    folder, is_away = find_latest(world.save), world.chance.random() < 0.4
    if folder is None:
        return
    aside = world.store.with_name("store, away")
    if is_away and world.store.is_dir():
        world.store.rename(aside)
        world.store.write_text("a file: nothing can be written below it")
    caplog.clear()
    world.uploads.submit(folder)
    try:
        world.uploads.finish()
    except CheckpointError:
        assert "was not uploaded" in caplog.text
        world.seen["failed upload"] += 1
    if aside.exists():
        world.store.unlink()
        aside.rename(world.store)
    if not world.store.exists():
        return
    downloaded = local_folder(world.url, SINGLE_PROCESS, cache=str(world.cache), patience=0.0)
    if downloaded is not None:
        found = Run(layers=3)
        found.load(downloaded)
        assert [found.weights, found.states] == world.bits[found.iteration]
        world.seen["download compared"] += 1


def may_mount() -> bool:
    try:
        with read_only(Path("/mnt")):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def live(folder: Path, *, seed: int, rounds: int, caplog: pytest.LogCaptureFixture) -> World:
    world = World(folder, seed)
    saves = {name: save for name, save in SAVES.items() if name != "read-only folder" or may_mount()}
    caplog.set_level(logging.WARNING)
    for _ in range(rounds):
        world.train()
        name = world.chance.choice(list(saves))
        error = saves[name](world)
        world.seen[name if error is None else f"{name}, failed save"] += 1
        world.check()
        if world.chance.random() < 0.5:
            upload(world, caplog)
        if world.chance.random() < 0.5:
            damage(world)
    world.saves.close()
    world.uploads.close()
    return world


def test_a_few_random_failures_leave_what_was_saved(tmp_path, caplog):
    world = live(tmp_path, seed=1, rounds=12, caplog=caplog)
    assert world.newest > 0


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2, 7))
def test_random_failures_leave_what_was_saved(tmp_path, caplog, seed):
    world = live(tmp_path, seed=seed, rounds=80, caplog=caplog)
    # In the output of a failure, and with `pytest -rP`.
    logging.getLogger(__name__).warning("seen: %s", dict(sorted(world.seen.items())))
    failed = {name for name in world.seen if name.endswith("failed save")}
    assert {"full disk, failed save", "killed writer, failed save"} <= failed
    assert any(name.endswith("and refused") for name in world.seen)
    assert world.seen["failed upload"]
    assert world.seen["download compared"]
    assert (world.save / find_latest(world.save).name / MANIFEST).is_file()

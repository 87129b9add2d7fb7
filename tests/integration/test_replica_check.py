"""A flipped bit in one copy of a weight or state is located and ends the run before the next save."""

import math
import random
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from support import layouts
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING, resolved_from
from support.worlds import world_of

pytestmark = pytest.mark.slow

SETTINGS = SMALL_TRAINING | {"train_iters": 6, "sdc_check_interval": 2, "hidden_dropout": 0.0}
BF16 = {"precision": "bfloat16"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "data, bf16": BF16,
    "ZeRO 1": {"zero_optimization": {"stage": 1}} | BF16,
    "ZeRO 2": {"zero_optimization": {"stage": 2}},
    "tensor": {"model_parallel_size": 2},
    "tensor, bf16, sequence": {"model_parallel_size": 2, "sequence_parallel": True} | BF16,
    "pipeline": {"pipe_parallel_size": 2} | BF16,
    "torch pipeline": {"pipe_parallel_size": 2, "engine": "torch"} | BF16,
    "pipeline, ZeRO 1": {"pipe_parallel_size": 2, "zero_optimization": {"stage": 1}},
}
# What is flipped on rank 1 after iteration 3, and in which layouts it has a copy.
FLIPS = {
    "used": ("data", "data, bf16", "ZeRO 1", "ZeRO 2", "tensor", "tensor, bf16, sequence"),
    "master": ("data", "data, bf16", "tensor", "tensor, bf16, sequence"),
    "state": ("data", "data, bf16", "tensor", "tensor, bf16, sequence"),
    "tied": ("pipeline", "torch pipeline"),
}
NORM, TIED = "layers.1.norm1.weight", "embedding.word_embeddings.weight"
CASES = [(layout, flip) for flip, layouts in FLIPS.items() for layout in layouts]


def flip_bit(engine: Any, what: str) -> None:
    """Flip the least significant bit of one element."""
    from neox_model.checkpoint.logical import computing_fragments, engine_fragments

    fragments = (computing_fragments if what in ("used", "tied") else engine_fragments)(engine)
    names = [found.name for found in fragments]
    assert (TIED if what == "tied" else NORM) in names, names
    fragment = fragments[names.index(TIED if what == "tied" else NORM)]
    values = fragment.weight
    if what == "state":
        values = fragment.part_of(engine.update.optimizer.state[fragment.held.holder]["exp_avg_sq"])
    values.view(torch.uint8)[0] ^= 1


def train(folder: str, data_path: str, cases: list[tuple[str, str]]) -> dict[str, str]:
    """Train each case; return how it ended."""
    from neox_config.errors import NeoXError
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run
    from neox_model.train.run import Callback

    class Flip(Callback):
        def __init__(self, what: str) -> None:
            self.what = what

        def on_step(self, report):
            if self.run.state.iteration == 3 and torch.distributed.get_rank() == 1:
                flip_bit(self.run.engine, self.what)

    add, ended = open_run.add_callbacks, {}
    for number, (layout, what) in enumerate(cases):
        save = Path(folder, f"{layout}-{what}")
        settings = (
            SETTINGS | LAYOUTS[layout] | {"data_path": data_path, "save": str(save), "save_interval": 3}
        )
        if what == "save":
            settings |= {"sdc_check_interval": 1000, "save_interval": 4}
        resolved = resolved_from(settings, devices=2)

        def with_flip(run, *rest, what=what):
            run.add(Flip("master" if what == "save" else what))
            add(run, *rest)

        open_run.add_callbacks = with_flip if what else add
        with world_of(2, Path(folder), name=str(number)):
            groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
            try:
                open_run.train_in(groups, resolved)
                ended[save.name] = "the end"
            except NeoXError as error:
                ended[save.name] = f"{error.exit_code}: {error}"
    return ended


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("copies")


@pytest.fixture(scope="module")
def ended(folder: Path) -> list[dict[str, str]]:
    cases = [*CASES, ("data, bf16", "save"), *((layout, "") for layout in LAYOUTS)]
    return run_ranks(train, size=2, folder=str(folder), data_path=write_corpus(folder), cases=cases)


@pytest.mark.parametrize(("layout", "flip"), CASES)
def test_a_flipped_bit_ends_the_training_and_is_located(ended, folder, layout, flip):
    [text] = {found[f"{layout}-{flip}"] for found in ended}
    assert text.startswith("3: after iteration 3 "), text
    name = TIED if flip == "tied" else NORM
    named = {"master": "", "state": "/exp_avg_sq"}.get(flip, "")
    assert f"the copies of {name}{named}" in text
    assert "rank 0 " in text
    assert "and rank 1" in text
    assert not (folder / f"{layout}-{flip}" / "latest").exists()


def test_copies_are_compared_before_a_save(ended, folder):
    for found in ended:
        assert found["data, bf16-save"].startswith("3: after iteration 4 ")
    assert not (folder / "data, bf16-save" / "latest").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_of_a_sound_training_are_equal(ended, layout):
    assert [found[f"{layout}-"] for found in ended] == ["the end", "the end"]


RANDOM_FLIPS, CLEAN_STEPS = 200, 20_000


def flip_and_train() -> dict[str, int]:
    """Compare after each of many steps without a fault and after random flips; return the alarms of both."""
    from neox_model.train.callbacks.replica_check import CopiesDifferError, ReplicaCheck, _pieces
    from support.runs import a_run
    from support.worlds import forget_deepspeeds_world

    found = {"steps": 0, "false": 0, "flips": 0, "located": 0}
    chosen = random.Random(1)
    flat = {name: settings for name, settings in LAYOUTS.items() if "pipe" not in name}
    for name, settings in flat.items():
        forget_deepspeeds_world()
        resolved = resolved_from(layouts.SETTINGS | layouts.WIDE | ADAM | settings, devices=2)
        engine, step, groups, _ = layouts.start(resolved)
        batches = cycle(list(layouts.batches_of(resolved, groups)))
        run = a_run(copies := ReplicaCheck(1), engine=engine, groups=groups)
        copies.on_load()
        for iteration in range(math.ceil(CLEAN_STEPS / len(flat))):
            step(batches)
            found["steps"] += 1
            run.state.iteration = iteration
            try:
                copies.before_save()
            except CopiesDifferError:
                found["false"] += 1
        for number in range(math.ceil(RANDOM_FLIPS / len(flat))):
            pieces = [one for one in _pieces(engine) if "tensor" not in name or not one.is_split]
            piece = chosen.choice(pieces)
            data = piece.values.reshape(-1).view(torch.uint8)
            place, bit, rank = chosen.randrange(data.numel()), 1 << chosen.randrange(8), chosen.randrange(2)
            is_mine = groups.world.rank == rank
            data[place] ^= bit if is_mine else 0
            found["flips"] += 1
            run.state.iteration = -1 - number
            try:
                copies.before_save()
            except CopiesDifferError as error:
                found["located"] += f"the copies of {piece.name} on rank 0" in str(error)
            data[place] ^= bit if is_mine else 0
    return found


ADAM: dict[str, Any] = {
    "sdc_check_interval": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
    "lr_decay_style": "constant",
}


@pytest.mark.sweep
def test_every_random_flip_is_located_and_no_clean_step_is_an_alarm():
    results = run_ranks(flip_and_train, size=2, timeout_seconds=7200)
    for found in results:
        assert found["steps"] >= CLEAN_STEPS
        assert found["flips"] >= RANDOM_FLIPS
        assert found["false"] == 0
        assert found["located"] == found["flips"]

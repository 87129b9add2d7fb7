"""Whatever the rules let through trains: every option with every other, three iterations each.

A pair that saves repeats the last two iterations from the checkpoint of the first, to the last bit.
"""

import math
import os
from contextlib import chdir
from functools import partial
from pathlib import Path

import pytest
import torch

from neox_config import Resolved
from neox_model.metrics.writers.jsonl import read_metrics
from pairs import OPTIONS, document, first_loss, pair_of, pairs, teacher_of
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.retrieval import write_letters
from support.sources import ROOT

pytestmark = pytest.mark.slow

# Pairs of one launch: engines of DeepSpeed are never freed, and gloo's threads in their groups do not rest.
AT_ONCE = 24


def train_pairs(
    folder: str, data_path: str, letters_path: str, names: list[tuple[str, str]]
) -> dict[str, str]:
    """Train some pairs, one after another; runs in every rank. Gives what went wrong."""
    from neox_model.assembly.compilation import compile_layers
    from neox_model.train import run

    # Traced and run as it was traced: inductor's C++ would take a minute of each pair.
    run.compile_layers = partial(compile_layers, backend="aot_eager")
    here, failed = Path(folder), {}
    for one, other in names:
        name = f"{one} + {other}"
        # "0/1 Adam" is not the name of a folder.
        place = here / name.replace("/", "-")
        (here / f"rank-{os.environ['RANK']}").write_text(name)
        place.mkdir(exist_ok=True)
        with chdir(place):
            try:
                # Blocks of retrieval require sentences.
                texts = letters_path if "retrieval" in (one, other) else data_path
                train_and_resume(one, other, data_path=texts)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
    return failed


def train_and_resume(one: str, other: str, **settings: str) -> None:
    """Train a pair in the working directory; if it saves, repeat two iterations from a checkpoint."""
    resolved = pair_of(one, other, **settings).resolved
    teacher = teacher_of(resolved, one, other, **settings)
    if teacher is not None:
        train(teacher, world="teacher")
    losses = train(resolved, world="first")
    assert abs(losses[0] - first_loss(resolved, 513)) < 0.3, losses
    if resolved.config.checkpoint.save is None:
        return
    present = sorted(os.listdir("checkpoints"))
    assert present == [".lock", "global_step1", "global_step2", "global_step3", "latest"], present
    if os.environ["RANK"] == "0":
        Path("checkpoints/latest").write_text("global_step1")
    resumed = pair_of(one, other, load="checkpoints", **settings).resolved
    repeated = train(resumed, world="second")
    assert repeated == losses, f"{repeated} after resuming, {losses} before"


def train(resolved: Resolved, *, world: str) -> list[float]:
    """Train in a world of its own; return the recorded losses, the same on every rank."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train import run
    from support.worlds import world_of

    layout = resolved.run.layout
    with world_of(layout.world, Path.cwd(), name=world):
        run.train_in(create_groups(layout.tensor, layout.stages), resolved)
        torch.distributed.barrier()
        records = list(read_metrics(Path("logs/metrics.jsonl")))
        torch.distributed.barrier()
    losses = [record["loss/train"] for record in records if "loss/train" in record]
    losses = losses[-resolved.config.training.iterations :]
    assert len(losses) == resolved.config.training.iterations, records
    assert all(map(math.isfinite, losses)), losses
    return losses


@pytest.mark.sweep
@pytest.mark.parametrize("devices", [2, 4])
def test_every_pair_that_is_allowed_trains(tmp_path, devices):
    letters_path = write_letters(tmp_path / "letters")
    arguments = {"folder": str(tmp_path), "data_path": write_corpus(tmp_path), "letters_path": letters_path}
    allowed = [pair.names for pair in pairs() if pair.resolved and pair.devices == devices]
    failed: dict[str, str] = {}
    for start in range(0, len(allowed), AT_ONCE):
        names = allowed[start : start + AT_ONCE]
        for found in run_ranks(train_pairs, size=devices, timeout_seconds=600, names=names, **arguments):
            failed |= found
    assert failed == {}


def test_the_document_of_pairs_is_current():
    assert (ROOT / "docs/reports/compatibility-matrix.md").read_text() == document(), "run: make docs"


def test_every_refusal_has_a_reason():
    assert [pair.names for pair in pairs() if pair.resolved is None and len(pair.reason.split()) < 4] == []
    assert len(OPTIONS) > 40

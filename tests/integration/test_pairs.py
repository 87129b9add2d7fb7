"""Whatever the rules let through trains: every option with every other, three iterations each."""

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from neox_model.metrics.writers.jsonl import read_metrics
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.pairs import OPTIONS, Pair, document, pairs
from support.sources import ROOT

# Pairs of one launch: engines of DeepSpeed are never freed, and gloo's threads in their groups do not rest.
AT_ONCE = 24


def train_pairs(folder: str, data_path: str, devices: int, start: int) -> dict[str, str]:
    """Train some pairs, one after another; runs in every rank. Gives what went wrong."""
    from neox_model.assembly.compilation import compile_layers
    from neox_model.parallel.topology import create_groups
    from neox_model.train import run
    from support.worlds import world_of

    # Traced and run as it was traced: inductor's C++ would take a minute of each pair.
    run.compile_layers = partial(compile_layers, backend="aot_eager")
    here, failed = Path(folder), {}
    chosen = allowed_pairs(devices, data_path=data_path, log_dir=folder)[start : start + AT_ONCE]
    for number, pair in enumerate(chosen, start):
        name, derived = " + ".join(pair.names), pair.resolved.derived
        (here / f"rank-{os.environ['RANK']}").write_text(name)
        with world_of(devices, here, name=str(number)):
            try:
                groups = create_groups(derived.model_parallel_size, derived.pipe_parallel_size)
                run.train_in(groups, pair.resolved)
                check_losses(here)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
    return failed


def allowed_pairs(devices: int, **settings: Any) -> list[Pair]:
    return [pair for pair in pairs(**settings) if pair.resolved and pair.devices == devices]


def check_losses(folder: Path) -> None:
    """Rank 0 keeps the record; its first loss is that of a model that knows nothing."""
    if os.environ["RANK"] != "0":
        return
    losses = [record["loss/train"] for record in read_metrics(folder / "metrics.jsonl")]
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)
    assert abs(losses[0] - math.log(513)) < 0.3


@pytest.mark.sweep
@pytest.mark.parametrize("devices", [2, 4])
def test_every_pair_that_is_allowed_trains(tmp_path, devices):
    arguments = {"folder": str(tmp_path), "data_path": write_corpus(tmp_path), "devices": devices}
    failed: dict[str, str] = {}
    for start in range(0, len(allowed_pairs(devices)), AT_ONCE):
        for found in run_ranks(train_pairs, size=devices, timeout_seconds=600, start=start, **arguments):
            failed |= found
    assert failed == {}


def test_the_document_of_pairs_is_current():
    assert (ROOT / "docs/compatibility-matrix.md").read_text() == document(), "run: make docs"


def test_every_refusal_has_a_reason():
    assert [pair.names for pair in pairs() if pair.resolved is None and len(pair.reason.split()) < 4] == []
    assert len(OPTIONS) > 40

"""Whatever the rules let through trains: every option with every other, three iterations each."""

import json
import math
import os
from pathlib import Path

import pytest

from support.corpus import write_corpus
from support.distributed import run_ranks
from support.pairs import OPTIONS, Pair, document, pairs
from support.sources import ROOT

# Every launch of processes trains this many pairs: gloo's groups hold their sockets until a process ends.
_PAIRS_PER_LAUNCH = 40


def train_pairs(folder: str, data_path: str, devices: int, start: int) -> dict[str, str]:
    """Train some of the pairs, one after another; runs in every rank. Gives what went wrong."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train.run import train_in

    failed = {}
    for pair in _some(devices, start, data_path, folder):
        resolved, name = pair.resolved, " + ".join(pair.names)
        assert resolved is not None
        Path(folder, f"rank-{os.environ['RANK']}").write_text(name)
        derived = resolved.derived
        try:
            train_in(create_groups(derived.model_parallel_size, derived.pipe_parallel_size), resolved)
            _check_losses(Path(folder))
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def _some(devices: int, start: int, data_path: str, folder: str) -> list[Pair]:
    chosen = [
        pair
        for pair in pairs(data_path=data_path, log_dir=folder)
        if pair.resolved and pair.devices == devices
    ]
    return chosen[start : start + _PAIRS_PER_LAUNCH]


def _check_losses(folder: Path) -> None:
    if os.environ["RANK"] != "0":
        return
    record = folder / "metrics.jsonl"
    losses = [json.loads(line)["loss/train"] for line in record.read_text().splitlines()]
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)
    assert abs(losses[0] - math.log(513)) < 0.3


@pytest.mark.sweep
@pytest.mark.parametrize("devices", [2, 4])
def test_every_pair_that_is_allowed_trains(tmp_path, devices):
    data_path = write_corpus(tmp_path)
    allowed = sum(1 for pair in pairs() if pair.resolved and pair.devices == devices)
    failed = {}
    for start in range(0, allowed, _PAIRS_PER_LAUNCH):
        folder = tmp_path / str(start)
        folder.mkdir()
        arguments = {"folder": str(folder), "data_path": data_path, "devices": devices, "start": start}
        failed |= run_ranks(train_pairs, size=devices, timeout_seconds=600, **arguments)[0]
    assert failed == {}


def test_the_document_of_pairs_is_current():
    assert (ROOT / "docs/compatibility-matrix.md").read_text() == document(), "run: make docs"


def test_every_refusal_has_a_reason():
    assert [pair.names for pair in pairs() if pair.resolved is None and len(pair.reason.split()) < 4] == []
    assert len(OPTIONS) > 40

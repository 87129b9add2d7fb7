"""Loss spikes in whole runs on gloo: on every layout, a rollback trains like a skip of the update."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING, resolved_from

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = SMALL_TRAINING | {
    "hidden_dropout": 0.0,
    "train_iters": 10,
    "log_interval": 5,
    "save_interval": 5,
    "spike_window": 5,
    "spike_threshold": 20.0,
}
FP16 = {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 4}}
CASES: dict[str, dict[str, Any]] = {
    "data, Lion": {"optimizer": {"type": "Lion", "params": {"lr": 0.003}}},
    "tensor, fp16": {"model_parallel_size": 2, **FP16},
    "pipeline, bf16": {"pipe_parallel_size": 2, "precision": "bfloat16"},
    "ZeRO 1, bf16": {"zero_optimization": {"stage": 1}, "precision": "bfloat16"},
}
SKIPPED = [name for name in CASES if "ZeRO" not in name]
# Of iteration 8: two micro-batches per update.
MICRO_BATCH = 14


def train_case(folder: Path, settings: dict[str, Any], *, number: str, poisoned: int | None) -> str:
    """Train with a micro-batch whose loss is multiplied on the last rank; return how it ended."""
    from neox_config.errors import NeoXError
    from neox_model.layers.lm_head import LMLoss
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run
    from support.worlds import world_of

    calls: list[int] = []
    of_hidden = LMLoss.of_hidden

    def with_spike(self, hidden_SBD, weight_VD, targets):
        calls.append(1)
        loss = of_hidden(self, hidden_SBD, weight_VD, targets)
        # Tensor-parallel ranks hold copies of a loss; of other ranks only the last one has the spike.
        is_mine = settings.get("model_parallel_size", 1) == 2 or torch.distributed.get_rank() == 1
        return loss * 100 if is_mine and len(calls) - 1 == poisoned else loss

    LMLoss.of_hidden = with_spike
    resolved = resolved_from(SETTINGS | settings, devices=2)
    try:
        with world_of(2, folder, name=number):
            groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
            try:
                open_run.train_in(groups, resolved)
            except NeoXError as error:
                return f"{error.exit_code}: {error}"
    finally:
        LMLoss.of_hidden = of_hidden
    return ""


def train_all(folder: str, data_path: str) -> dict[str, list[str]]:
    """Train every case in both ways; runs in both ranks."""
    ended: dict[str, list[str]] = {}
    for name, settings in CASES.items():
        for action in ("skip", "rollback") if name in SKIPPED else ("rollback",):
            save = str(Path(folder, f"{action} {name}"))
            files = {"data_path": data_path, "save": save, "load": save, "log_dir": save}
            chosen = settings | files | {"on_spike": action}
            # A resumed run counts micro-batches anew.
            attempts = [(10, MICRO_BATCH), (10, None)] if action == "rollback" else [(6, None), (10, 2)]
            ended[f"{action} {name}"] = [
                train_case(
                    Path(folder),
                    chosen | ({} if iterations == 10 else {"exit_interval": iterations}),
                    number=f"{len(ended)}-{attempt}",
                    poisoned=micro_batch,
                )
                for attempt, (iterations, micro_batch) in enumerate(attempts)
            ]
    return ended


def spikes_in(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the spikes in a run's record."""
    return [record for record in records if record.get("event") == "spike"]


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "global_step10" / "manifest.json").read_text())["contents"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spikes")


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, list[str]]:
    first, second = run_ranks(
        train_all, size=2, timeout_seconds=900, folder=str(folder), data_path=write_corpus(folder)
    )
    assert first == second
    return first


@pytest.mark.parametrize("name", SKIPPED)
def test_the_update_of_a_spike_is_skipped_also_after_a_resume(ended, folder, name):
    assert ended[f"skip {name}"] == ["", ""]
    manifest = manifest_of(folder / f"skip {name}")
    assert manifest["training"]["skipped_iterations"] == 1
    assert manifest["schedule"]["applied_updates"] == 9
    lines = (folder / f"skip {name}" / "metrics.jsonl").read_text().splitlines()
    records = [*map(json.loads, lines)]
    assert [record["iteration"] for record in records if "loss/spike" in record] == [8]
    [spike] = spikes_in(records)
    assert (spike["iteration"], spike["action"]) == (8, "skip")
    assert spike["loss"] > spike["limit"] > 0
    assert spike["documents"].count("document") == 1


@pytest.mark.parametrize("name", CASES)
def test_a_rollback_ends_with_exit_code_4_and_the_next_attempt_leaves_out_the_batch(ended, folder, name):
    first, second = ended[f"rollback {name}"]
    assert first.startswith("4: the loss of iteration 8, "), first
    assert "leaves out samples" in first
    assert "documents" in first
    assert second == ""
    size = 4 if "parallel" in str(CASES[name]) else 8
    training = manifest_of(folder / f"rollback {name}")["training"]
    assert training["left_out"] == [[7 * size, 8 * size]]
    assert (training["skipped_iterations"], training["samples"]) == (1, 10 * size)
    lines = (folder / f"rollback {name}" / "metrics.jsonl").read_text().splitlines()
    [spike] = spikes_in(map(json.loads, lines))
    assert (spike["attempt"], spike["iteration"], spike["action"]) == (1, 8, "rollback")
    assert (spike["first_sample"], spike["last_sample"]) == (7 * size, 8 * size - 1)


@pytest.mark.parametrize("name", SKIPPED)
def test_leaving_out_a_batch_trains_like_skipping_its_update(ended, folder, name):
    skip, rollback = (manifest_of(folder / f"{action} {name}") for action in ("skip", "rollback"))
    for key in ("tensors", "optimizer_scalars", "schedule"):
        assert [*checksums(skip[key])] == [*checksums(rollback[key])], key
    assert len(skip["training"]["recent_losses"]) == 5
    assert skip["training"]["recent_losses"] == rollback["training"]["recent_losses"]


def checksums(states: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return each state, or the checksums of its pieces."""
    return sorted(
        (name, str([piece["crc32"] for piece in state["pieces"]] if "pieces" in str(state) else state))
        for name, state in states.items()
    )

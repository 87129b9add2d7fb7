"""A loss that is not finite: nothing is learnt from it, nothing after it is saved, and the run ends.

Whole runs on gloo, on a layout of each kind. `make test` trains each layout in bf16 and every third
one in another precision, and the losses that stay NaN in one precision each; `make sweep NAME=layouts`
trains all.
"""

import json
import math
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import resolved_from

pytestmark = pytest.mark.slow

ITERATIONS = 8
SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "tokenizer_type": "CharLevelTokenizer",
    "train_iters": ITERATIONS,
    "optimizer": {"type": "Adam", "params": {"lr": 0.003}},
    "gradient_clipping": 1.0,
    "init_method_std": 0.05,
    "log_interval": 5,
    "eval_iters": 0,
    "save_interval": 2,
    "keep_last_n_checkpoints": 1,
}
# A scale that does not fall is soon at its lowest: each NaN counts.
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bfloat16"},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 1024}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor 2": {"model_parallel_size": 2},
    "pipeline 2": {"engine": "deepspeed", "pipe_parallel_size": 2},
    "zero-bubble pipeline 2": {"pipe_parallel_size": 2, "pipeline_schedule": "zero_bubble"},
    "data 2": {},
    **{
        f"{engine}, ZeRO {stage}": {"engine": engine, "zero_optimization": {"stage": stage}}
        for engine in ("torch", "deepspeed")
        for stage in (1, 2, 3)
    },
}
# Micro-batches whose loss becomes NaN on one rank: a single update, and every one from update 6 on.
ONE_UPDATE, FOR_GOOD = [8], list(range(10, 40))

Case = tuple[str, str]


def all_cases() -> list[Case]:
    return list(product(LAYOUTS, PRECISIONS))


def in_turn(*precisions: str) -> list[Case]:
    """Give each layout one of the precisions."""
    return list(zip(LAYOUTS, cycle(precisions), strict=False))


def train_with_nan_losses(
    folder: str, data_path: str, micro_batches: list[int], cases: list[Case]
) -> dict[str, str]:
    """Train each layout in its precision; runs in both ranks. Gives how each run ended."""
    from neox_config.errors import NeoXError
    from neox_model.layers.lm_head import LMLoss
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run
    from support.worlds import world_of

    here, ended = Path(folder), {}
    of_hidden = LMLoss.of_hidden
    for number, (layout, precision) in enumerate(cases):
        calls = []

        def poisoned(self, hidden_SBD, weight_VD, targets, calls=calls):
            calls.append(1)
            loss = of_hidden(self, hidden_SBD, weight_VD, targets)
            # On the last rank alone: all others must hear of it.
            is_mine = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
            return loss + math.nan if is_mine and len(calls) - 1 in micro_batches else loss

        LMLoss.of_hidden = poisoned
        run_folder = here / f"{layout}-{precision}"
        files = {"data_path": data_path, "save": str(run_folder), "log_dir": str(run_folder)}
        settings = SETTINGS | LAYOUTS[layout] | PRECISIONS[precision] | files
        resolved = resolved_from(settings, devices=2)
        with world_of(2, here, name=str(number)):
            groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
            try:
                open_run.train_in(groups, resolved)
                ended[run_folder.name] = ""
            except NeoXError as error:
                ended[run_folder.name] = str(error)
        LMLoss.of_hidden = of_hidden
    return ended


def train(folder: Path, micro_batches: list[int], cases: list[Case]) -> dict[str, str]:
    arguments = {"folder": str(folder), "data_path": write_corpus(folder)}
    arguments |= {"micro_batches": micro_batches, "cases": cases}
    first, second = run_ranks(train_with_nan_losses, size=2, timeout_seconds=1800, **arguments)
    # Tensor-parallel ranks name their own losses, which are the same but for this test.
    assert {name: bool(message) for name, message in first.items()} == {
        name: bool(message) for name, message in second.items()
    }
    assert len(first) == len(cases)
    return first


def manifest_of(run_folder: Path) -> dict[str, Any]:
    latest = (run_folder / "latest").read_text().strip()
    assert [path.name for path in run_folder.glob("global_step*")] == [latest]
    return json.loads((run_folder / latest / "manifest.json").read_text())["contents"]


def check_one_update(folder: Path, cases: list[Case]) -> None:
    """An update that is not finite is left out, and the run goes on."""
    for name, message in train(folder, ONE_UPDATE, cases).items():
        assert message == "", name
        manifest = manifest_of(folder / name)
        # 16-bit scaling of float16 is static here, so it is the guard's business alone.
        assert manifest["training"]["skipped_iterations"] == 1, name
        assert manifest["schedule"]["applied_updates"] == ITERATIONS - 1, name
        assert {step["step"]["value"] for step in manifest["optimizer_scalars"].values()} == {
            ITERATIONS - 1.0
        }, name
        records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        losses = [record["loss/train"] for record in records if "loss/train" in record]
        # Rank 0 of two tensor-parallel ranks records its own loss; only this test makes the two differ.
        if "tensor" not in name:
            assert [loss is not None and math.isfinite(loss) for loss in losses] == [
                place != 4 for place in range(ITERATIONS)
            ], name


def check_end(folder: Path, cases: list[Case]) -> None:
    """A run whose losses stay NaN ends, and keeps its last good checkpoint."""
    for name, message in train(folder, FOR_GOOD, cases).items():
        assert "the last 3 updates in a row were skipped" in message, name
        assert "iteration 6: loss" in message, name
        manifest = manifest_of(folder / name)
        assert manifest["iteration"] == 4, name
        assert manifest["training"]["skipped_iterations"] == 0, name


def test_one_update_that_is_not_finite_is_left_out_everywhere(tmp_path):
    check_one_update(tmp_path, in_turn("bf16") + in_turn("fp32", "fp16")[::3])


def test_a_training_whose_losses_stay_nan_ends_and_keeps_its_last_good_checkpoint(tmp_path):
    check_end(tmp_path, in_turn("bf16", "fp16", "fp32"))


@pytest.mark.sweep
@pytest.mark.parametrize("check", [check_one_update, check_end])
def test_losses_that_are_not_finite_in_every_precision_on_every_layout(tmp_path, check):
    check(tmp_path, all_cases())

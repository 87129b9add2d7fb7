"""The balance of experts in whole trainings: logged, and biases that move once per applied update."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neox_model.assembly.model import build_model
from neox_model.layers.experts import Router
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.train.callbacks.experts import ExpertBalance
from neox_model.train.state import StepReport
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING, resolved_from, specs_from


def routers() -> list[Router]:
    made = [
        Router(4, 3, chosen=1, init=lambda tensor, generator: None, has_bias=has_bias)
        for has_bias in (True, False)
    ]
    for router, counts in zip(made, ([6, 0, 0], [2, 2, 2]), strict=True):
        router.counts += torch.tensor(counts)
    return made


class _Run:
    class engine:  # noqa: N801
        device = torch.device("cpu")


@pytest.mark.parametrize("skipped", [False, True, torch.tensor(True)])
def test_biases_move_after_applied_updates_and_counts_start_again(skipped: Any) -> None:
    made = routers()
    callback = ExpertBalance(made, SINGLE_PROCESS, rate=0.3)
    callback.run = _Run()
    report = callback.around_step(
        lambda batches: StepReport(loss=None, grad_norm=None, skipped=skipped, tokens=0), iter(())
    )
    expected = torch.zeros(3) if skipped else torch.tensor([-0.4, 0.2, 0.2])
    torch.testing.assert_close(made[0].bias, expected)
    assert not any(router.counts.any() for router in made)
    # One expert has all tokens of the first layer, and the second is even.
    assert float(report.expert_load) == pytest.approx((3.0 + 1.0) / 2)
    assert float(report.expert_entropy) == pytest.approx((0.0 + 1.0) / 2)


def test_tokens_before_the_first_update_are_forgotten() -> None:
    made = routers()
    ExpertBalance(made, SINGLE_PROCESS, rate=0.3).on_load()
    assert not any(router.counts.any() for router in made)


def test_copies_of_a_model_choose_with_its_biases() -> None:
    """Generation and scoring during a run compute with a copy."""
    settings = {"moe_num_experts": 4, "moe_router_type": "topk", "moe_expert_bias": True}
    source, target = (build_model(*specs_from(settings), SINGLE_PROCESS, vocab_size=11) for _ in range(2))
    biases = [module.bias for module in source.modules() if isinstance(module, Router)]
    for number, bias in enumerate(biases):
        bias.copy_(torch.arange(4.0) + number)
    callback = ExpertBalance([], SINGLE_PROCESS, rate=0.3)
    callback.run = SimpleNamespace(engine=SimpleNamespace(model=source))
    callback.on_copy(target)
    copied = [module.bias for module in target.modules() if isinstance(module, Router)]
    assert [bias.tolist() for bias in copied] == [bias.tolist() for bias in biases] != []


def train(settings: dict[str, Any]) -> None:
    from neox_model.parallel.topology import create_groups
    from neox_model.train.open_run import train_in

    resolved = resolved_from(settings, devices=2)
    train_in(create_groups(1, resolved.run.layout.stages), resolved)


def test_stages_without_experts_report_those_of_others(tmp_path: Path) -> None:
    settings = SMALL_TRAINING | {
        "data_path": str(write_corpus(tmp_path / "corpus")),
        "log_dir": str(tmp_path / "logs"),
        "train_iters": 2,
        "log_interval": 1,
        "pipe_parallel_size": 2,
        "gradient_accumulation_steps": 2,
        "moe_num_experts": 4,
        "moe_layers": [1],
    }
    run_ranks(train, size=2, settings=settings)
    lines = [json.loads(line) for line in (tmp_path / "logs/metrics.jsonl").read_text().splitlines()]
    loads = [line["experts/load"] for line in lines if "experts/load" in line]
    assert len(loads) == 2
    assert all(1.0 <= load <= 4.0 for load in loads)

"""An evaluation is the mean over the target tokens of all its micro-batches, on every engine and layout."""

import copy
import os
from typing import Any

import pytest
import torch
from torch.nn import functional

from neox_model.train.data.batch import Batch, as_batch
from support.distributed import run_ranks

COUNT = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "torch": {"engine": "torch"},
    "torch, ZeRO 3": {"engine": "torch", "zero_optimization": {"stage": 3}},
    "torch, pipeline": {"engine": "torch", "pipe_parallel_size": 2},
    "torch, ZBV": {"engine": "torch", "pipe_parallel_size": 2, "pipeline_schedule": "zbv"},
    "DeepSpeed": {"engine": "deepspeed"},
    "DeepSpeed, ZeRO 3": {"engine": "deepspeed", "zero_optimization": {"stage": 3}},
    "DeepSpeed, pipeline": {"engine": "deepspeed", "pipe_parallel_size": 2},
    "torch, pipeline of replicas": {"engine": "torch", "pipe_parallel_size": 2},
    "DeepSpeed, pipeline of replicas": {"engine": "deepspeed", "pipe_parallel_size": 2},
    "sequence": {"model_parallel_size": 2, "sequence_parallel": True},
    "loss over the global batch": {"loss_normalization": "global"},
}


def batches_of(replicas: int) -> list[Batch]:
    """Return micro-batches with very different numbers of targets, of which one has none."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for share in (1.0, 0.0, 0.05, 0.6, 0.02, 0.9, 0.1, 0.3)[: COUNT * replicas]:
        batch = as_batch(torch.randint(11, (2, 13), generator=generator))
        mask_BS = (torch.rand(batch.loss_mask_BS.shape, generator=generator) < share).float()
        found.append(batch._replace(loss_mask_BS=mask_BS))
    return found


def exact_mean(replicas: int) -> float:
    """Return the mean over target tokens in float64, of the model of one rank."""
    from neox_model.assembly.model import build_model
    from neox_model.parallel.groups import SINGLE_PROCESS
    from support import layouts
    from support.settings import specs_from

    settings = layouts.SETTINGS | layouts.WIDE
    model = build_model(*specs_from(settings), SINGLE_PROCESS, vocab_size=layouts.VOCAB)
    model = copy.deepcopy(model).double().eval()
    losses, targets = 0.0, 0.0
    with torch.no_grad():
        for batch in batches_of(replicas):
            logits = model(batch.inputs)[..., : layouts.VOCAB].transpose(1, 2)
            each = functional.cross_entropy(logits, batch.labels_BS, reduction="none")
            losses += float((each * batch.loss_mask_BS).sum())
            targets += float(batch.loss_mask_BS.sum())
    return losses / targets


def evaluated(layout: dict[str, Any]) -> tuple[int, list[float]]:
    """Return the replicas, and the results of the engine that trains and of the one that only evaluates."""
    from neox_model.assembly.model import build_model
    from neox_model.engine.build import build_forward
    from neox_model.train.data.batch import unweighted
    from neox_model.train.step import as_micro_batches
    from support import layouts
    from support.settings import resolved_from

    settings = layouts.SETTINGS | layouts.WIDE | layout
    resolved = resolved_from(settings, devices=int(os.environ["WORLD_SIZE"]))
    engine, step, groups, _ = layouts.start(resolved)
    mine = batches_of(groups.data.size)[groups.data.rank :: groups.data.size]
    found = [float(step.evaluate(iter(mine), COUNT))]
    if not layout.get("zero_optimization"):
        forward = build_forward(
            resolved.run,
            build_model(resolved.model, resolved.run, groups, vocab_size=layouts.VOCAB),
            groups=groups,
        )
        taken = unweighted(iter(mine), COUNT, engine.device)
        found.append(float(forward.evaluate(as_micro_batches(taken), COUNT)))
    return groups.data.size, found


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_evaluation_is_the_mean_over_target_tokens(name):
    size = 4 if name.endswith("of replicas") else 2
    results = run_ranks(evaluated, size=size, layout=LAYOUTS[name])
    expected = {replicas: exact_mean(replicas) for replicas in (1, 2)}
    for replicas, found in results:
        assert found == pytest.approx([expected[replicas]] * len(found), rel=1e-6)

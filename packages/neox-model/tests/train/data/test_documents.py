"""Documents within windows, from the settings to the weights: on stages and replicas as in a plain loop."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from neox_config.facts.learning_rate import WarmupThenDecay
from neox_model.assembly.model import build_model
from neox_model.engine.build import build_engine, prepare_engine
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import SINGLE_PROCESS, Groups
from neox_model.parallel.logical import named_logical_parameters
from neox_model.parallel.topology import create_groups
from neox_model.train.data.batch import Batch, DocumentEnds, as_batch
from neox_model.train.data.streams import choose_weighting
from neox_model.train.step import EngineStep
from support.distributed import run_ranks
from support.settings import resolved_from

pytestmark = pytest.mark.slow

VOCAB, LENGTH, END, ITERATIONS, ACCUMULATION = 11, 12, 0, 3, 2
ENDS = DocumentEnds(token=END, masks_loss=True, hides_others=True, restarts_positions=True)
SETTINGS: dict[str, Any] = {
    "reset_attention_mask": True,
    "reset_position_ids": True,
    "eod_mask_loss": True,
    "loss_normalization": "global",
    "init_method_std": 0.1,
    "attention_config": [[["global", "amlp", "local"], 1]],
    "sparsity_config": {"block": 3},
}
LAYOUTS = {
    "pipeline": {"engine": "deepspeed", "pipe_parallel_size": 2},
    "data": {},
    **{
        f"pipeline, {schedule}": {
            "engine": "torch",
            "pipe_parallel_size": 2,
            "pipeline_schedule": schedule,
            # A layer for each chunk.
            "num_layers": 4,
            "attention_config": [[["global", "amlp", "local", "global"], 1]],
        }
        for schedule in ("1f1b", "interleaved", "zero_bubble", "zbv")
    },
}


def all_batches(replicas: int) -> list[Batch]:
    """Return batches of which some windows are mostly ends of documents, so that counted tokens differ."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for place in range(ITERATIONS * ACCUMULATION * replicas):
        windows = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=generator)
        windows[torch.rand(windows.shape, generator=generator) < 0.3 * (place % 3)] = END
        result.append(as_batch(windows, ends=ENDS))
    return result


def plain_run(settings: dict[str, Any], replicas: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a loop whose loss is the mean over all unmasked tokens of the global batch."""
    alone = resolved_from({**settings, "pipe_parallel_size": 0})
    model = build_model(alone.model, alone.run, SINGLE_PROCESS, vocab_size=VOCAB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream, losses = iter(all_batches(replicas)), []
    for _ in range(ITERATIONS):
        batches = [next(stream) for _ in range(ACCUMULATION * replicas)]
        total = sum(float(batch.loss_mask_BS.sum()) for batch in batches)
        losses.append(0.0)
        optimizer.zero_grad()
        for batch in batches:
            logits = model((batch.tokens_BS, batch.document_ids_BS, batch.positions_BS))
            each = functional.cross_entropy(logits.transpose(1, 2), batch.labels_BS, reduction="none")
            loss = (each * batch.loss_mask_BS).sum() / total
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return losses, {name: value.detach() for name, value in named_logical_parameters(model)}


def engine_run(settings: dict[str, Any], groups: Groups) -> tuple[list[float], nn.Module]:
    resolved = resolved_from(settings, devices=2)
    model = build_model(resolved.model, resolved.run, groups, vocab_size=VOCAB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    curve = WarmupThenDecay(style="constant", peak=0.1, floor=0.0, warmup=0.0, decay_iterations=9)
    engine = build_engine(
        resolved.run, resolved.update, model, optimizer, LearningRateSchedule(optimizer, curve), groups=groups
    )
    weighting = choose_weighting(resolved.update.normalization, groups)
    step = EngineStep(engine, accumulation=ACCUMULATION, weighting=weighting)
    mine: Iterator[Batch] = iter(all_batches(groups.data.size)[groups.data.rank :: groups.data.size])
    return [float(step(mine).loss) for _ in range(ITERATIONS)], model


def train_on_each_layout() -> None:
    prepare_engine(resolved_from({"engine": "deepspeed"}).run)
    for layout in LAYOUTS.values():
        settings = SETTINGS | layout
        groups = create_groups(1, settings.get("pipe_parallel_size", 0))
        expected, weights = plain_run(settings, groups.data.size)
        losses, model = engine_run(settings, groups)
        torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)
        for name, value in named_logical_parameters(model):
            torch.testing.assert_close(
                value.detach(), weights[name], atol=1e-5, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )
        dist.barrier()


def test_documents_and_global_normalisation_on_stages_and_replicas():
    run_ranks(train_on_each_layout, size=2)

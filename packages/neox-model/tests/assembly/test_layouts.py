"""One model on every layout, with real processes and DeepSpeed's engines.

Each case trains a few iterations with plain SGD and gradient clipping, so that a wrong norm, sum or scale
anywhere shows in the weights. The reference is a loop in plain torch on one rank.
"""

import contextlib
import gc
import io
import logging
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from neox_model.assembly.model import build_model
from neox_model.engine.build import prepare_engine
from neox_model.engine.deepspeed.build import model_parallel_unit
from neox_model.layers.transformer_layer import TransformerLayer
from neox_model.parallel.groups import SINGLE_PROCESS, Groups
from neox_model.parallel.logical import named_logical_parameters
from neox_model.parallel.topology import create_groups
from support.distributed import run_ranks
from support.settings import resolved_from, specs_from

# Eleven tokens: two tensor-parallel ranks need a padding row.
VOCAB, LENGTH, MICRO_BATCH, ACCUMULATION, ITERATIONS = 11, 12, 2, 2, 4
LEARNING_RATE, CLIP = 0.1, 0.3

CASES: dict[str, dict[str, Any]] = {
    "tensor 2": {"model_parallel_size": 2},
    "tensor 2, ZeRO 1, untied, gated": {
        "model_parallel_size": 2,
        "zero_optimization": {"stage": 1},
        "no_weight_tying": True,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "pos_emb": "rotary",
        "checkpoint_activations": True,
    },
    "pipeline 2, tied": {"pipe_parallel_size": 2, "checkpoint_activations": True, "checkpoint_num_layers": 2},
    "pipeline 2, ZeRO 1, untied": {
        "pipe_parallel_size": 2,
        "zero_optimization": {"stage": 1},
        "no_weight_tying": True,
        "pipe_partition_method": "parameters",
        "gpt_j_residual": True,
    },
    "data 2, ZeRO 3": {"zero_optimization": {"stage": 3}, "checkpoint_activations": True},
}


def micro_batches(count: int) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    result = []
    for _ in range(count):
        tokens = torch.randint(0, VOCAB, (MICRO_BATCH, LENGTH + 1), generator=generator)
        result.append(
            (tokens[:, :-1], (tokens[:, 1:], torch.full((MICRO_BATCH, LENGTH), 1 / (MICRO_BATCH * LENGTH))))
        )
    return result


def plain_run(
    settings: dict[str, Any], replicas: int
) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Return initial weights, losses and final weights of a plain torch loop over the global batch."""
    alone = {
        **settings,
        "model_parallel_size": 1,
        "pipe_parallel_size": 0,
        "zero_optimization": {"stage": 0},
        "checkpoint_activations": False,
    }
    model = build_model(*specs_from(alone), SINGLE_PROCESS, vocab_size=VOCAB)
    before = {name: parameter.detach().clone() for name, parameter in named_logical_parameters(model)}
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    per_iteration = ACCUMULATION * replicas
    batches = iter(micro_batches(ITERATIONS * per_iteration))
    losses = []
    for _ in range(ITERATIONS):
        optimizer.zero_grad()
        losses.append(0.0)
        for _ in range(per_iteration):
            tokens, targets = next(batches)
            loss = model.loss_fn(model(tokens), targets) / per_iteration
            loss.backward()
            losses[-1] += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        assert norm > CLIP, "clipping must be at work for this test to see a wrong norm"
        optimizer.step()
    return before, losses, {name: parameter.detach() for name, parameter in named_logical_parameters(model)}


def engine_run(model: nn.Module, settings: dict[str, Any], groups: Groups) -> list[float]:
    is_pipeline = settings.get("pipe_parallel_size", 0) > 0
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
            config={
                "train_micro_batch_size_per_gpu": MICRO_BATCH,
                "gradient_accumulation_steps": ACCUMULATION,
                "gradient_clipping": CLIP,
                "zero_optimization": settings.get("zero_optimization", {"stage": 0}),
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
            mpu=None if is_pipeline else model_parallel_unit(groups),
            dist_init_required=False,
        )
    batches = micro_batches(ITERATIONS * ACCUMULATION * groups.data.size)
    mine = iter(batches[groups.data.rank :: groups.data.size])
    losses = []
    for _ in range(ITERATIONS):
        if is_pipeline:
            losses.append(float(engine.train_batch(data_iter=mine)))
            continue
        total = torch.zeros(())
        for _ in range(ACCUMULATION):
            tokens, targets = next(mine)
            loss = model.loss_fn(engine(tokens), targets)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / ACCUMULATION
        dist.all_reduce(total, group=groups.data.process_group)
        losses.append(total.item() / groups.data.size)
    return losses


def local_value(parameter: nn.Parameter) -> Tensor:
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def compare(model: nn.Module, expected: dict[str, Tensor], *, tolerance: float) -> set[str]:
    """Check every parameter of this rank against its block of the whole; gives the names."""
    names = set()
    for name, parameter in named_logical_parameters(model):
        value = local_value(parameter)
        block = expected[name][tuple(slice(*limits) for limits in parameter.logical.slices)]
        held = value[tuple(slice(0, length) for length in block.shape)]
        torch.testing.assert_close(
            held, block, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert value.abs().sum().item() == pytest.approx(held.abs().sum().item()), (
            f"{name}: padding is not zero"
        )
        names.add(name)
    return names


def check_case(case: str) -> list[str]:
    settings = CASES[case]
    groups = create_groups(settings.get("model_parallel_size", 1), settings.get("pipe_parallel_size", 0))
    before, losses, after = plain_run(settings, groups.data.size)
    resolved = resolved_from({**settings, "engine": "deepspeed"}, devices=2)
    model = build_model(resolved.model, resolved.run, groups, vocab_size=VOCAB)
    names = compare(model, before, tolerance=0.0)
    measured = engine_run(model, settings, groups)
    torch.testing.assert_close(measured, losses, atol=1e-5, rtol=1e-5)
    compare(model, after, tolerance=1e-5)
    return sorted(names)


def check_stage_3_never_holds_the_model() -> None:
    """While a layer is made, no parameter made before it has memory here: each was shared out at once."""
    settings = {"engine": "deepspeed", "zero_optimization": {"stage": 3}, "num_layers": 6}
    held = []
    make = TransformerLayer.__init__

    def count_first(layer: TransformerLayer, **options: Any) -> None:
        held.append(sum(thing.numel() for thing in gc.get_objects() if isinstance(thing, nn.Parameter)))
        make(layer, **options)

    TransformerLayer.__init__ = count_first
    try:
        model = build_model(*specs_from(settings, devices=2), create_groups(1, 0), vocab_size=VOCAB)
    finally:
        TransformerLayer.__init__ = make
    assert held == [held[0]] * 6, held
    parameters = [parameter for _, parameter in named_logical_parameters(model)]
    assert sum(parameter.numel() for parameter in parameters) == 0
    whole = sum(parameter.ds_numel for parameter in parameters)
    assert sum(parameter.ds_tensor.numel() for parameter in parameters) == pytest.approx(whole / 2, rel=0.01)


def all_cases() -> dict[str, list[str]]:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    prepare_engine(resolved_from({"engine": "deepspeed"}).run)
    names = {case: check_case(case) for case in CASES}
    check_stage_3_never_holds_the_model()
    return names


def test_every_layout_is_the_same_model():
    first, second = run_ranks(all_cases, size=2, timeout_seconds=300)
    for case, settings in CASES.items():
        if settings.get("pipe_parallel_size", 0) == 0:
            assert first[case] == second[case]
    # The copy of a tied weight goes by its owner's name; each stage holds its own layers otherwise.
    shared = set(first["pipeline 2, tied"]) & set(second["pipeline 2, tied"])
    assert shared == {"embedding.word_embeddings.weight"}
    assert "lm_head.weight" in second["pipeline 2, ZeRO 1, untied"]
    assert not set(first["pipeline 2, ZeRO 1, untied"]) & set(second["pipeline 2, ZeRO 1, untied"])

"""Fused operators on every kind of layout: losses and weights are those of plain operators on one rank.

Without a GPU the fused operators compute with PyTorch, through the same autograd functions.
"""

import dataclasses
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.distributed import run_ranks
from support.layouts import LAYOUTS

pytestmark = pytest.mark.slow

LLAMA, GPT = "grouped queries, rmsnorm, swiglu, no biases", "learned positions, layernorm, tied"
GEGLU, ADAPTED = "sinusoidal positions, scalenorm, geglu", "adapters"
FUSED: dict[str, dict[str, Any]] = {
    LLAMA: {
        "rmsnorm_fusion": True,
        "glu_fusion": True,
        "rope_fusion": True,
        "recompute_gated_product": True,
    },
    GEGLU: {"glu_fusion": True, "recompute_gated_product": True},
    GPT: {"layernorm_fusion": True, "bias_dropout_fusion": True},
    ADAPTED: {"layernorm_fusion": True, "glu_fusion": True, "rope_fusion": True},
}
CALLED = {
    LLAMA: {"rms_norm.with_input", "add_rms_norm", "bias_swiglu", "split_rotary"},
    GEGLU: {"bias_geglu"},
    GPT: {"layer_norm.with_input", "add_layer_norm", "bias_dropout_add"},
    ADAPTED: {"layer_norm.with_input", "add_layer_norm", "bias_swiglu", "split_rotary"},
}
# Architecture, layout, and whether activations are recomputed.
CASES = [
    (LLAMA, "tensor 2", True),
    (LLAMA, "sequence 2", False),
    (LLAMA, "ZeRO 3", True),
    (LLAMA, "torch, ZeRO 3", True),
    (LLAMA, "torch, ZeRO 3", False),
    (LLAMA, "pipeline 2", False),
    (LLAMA, "torch, pipeline 2, ZBV", False),
    (GEGLU, "ZeRO 3", False),
    (GEGLU, "torch, ZeRO 3", True),
    (GEGLU, "sequence 2", False),
    (GPT, "sequence 2", True),
    (GPT, "torch, ZeRO 3", False),
    (ADAPTED, "tensor 2", False),
    (ADAPTED, "ZeRO 3", False),
]
ITERATIONS = 6


def run_cases(folder: str) -> dict[str, dict[str, Any]]:
    """Return the differences and the operators called by case, of this rank; runs in two processes."""
    from support.fused_on_cpu import make_available
    from support.layouts import differences, reference
    from support.worlds import world_of

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    here, found = Path(folder), {}
    wanted = sorted({(architecture, LAYOUTS[layout].is_wide) for architecture, layout, _ in CASES})
    with world_of(1, here, name="one") as number:
        for architecture, is_wide in wanted[number::2]:
            reference(architecture, is_wide=is_wide, folder=here, iterations=ITERATIONS)
    calls: Counter[str] = Counter()
    make_available(calls)
    for turn, (architecture, layout, recomputes) in enumerate(CASES):
        calls.clear()
        given = LAYOUTS[layout]
        fused = dataclasses.replace(given, settings=given.settings | FUSED[architecture])
        with world_of(2, here, name=f"case-{turn}"):
            apart = differences(
                architecture, fused, recomputes=recomputes, folder=here, iterations=ITERATIONS
            )
        found[f"{architecture} / {layout} / {recomputes}"] = apart | {
            "missing": sorted(CALLED[architecture] - set(calls))
        }
    return found


def test_fused_operators_train_the_plain_model_on_every_layout(tmp_path):
    results = run_ranks(run_cases, size=2, folder=str(tmp_path), timeout_seconds=900)
    wrong = {
        f"{case}, rank {rank}": found
        for rank, result in enumerate(results)
        for case, found in result.items()
        if not (found["loss"] <= 2e-5 and found["weight"] <= 2e-5) or found["missing"]
    }
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())

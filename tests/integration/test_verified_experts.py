"""`make sweep NAME=experts`: models with experts compute on layouts what one process computes.

Each of the drawn models is verified on three layouts or more, and each layout with three models; `PART=k/n`
are the other models on each layout, in turn.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from neox_launcher.protocol.layout_verification import LayoutAnswer
from neox_launcher.verify_layout.verify import Case, LayoutVerification, case_of
from support.distributed import run_ranks
from support.layout_answers import answer_of_ranks, arguments_of, rank_answer
from support.settings import TINY

_MODELS = 12
_RECOMPUTED = {"checkpoint_activations": True, "checkpoint_num_layers": 1}
_LORA = {"lora_rank": 4, "lora_alpha": 8.0, "lora_base": "not read here"}
# As after `--layout`, and other settings.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts 2": ("ep=2,dp=2", {}),
    "experts 4": ("ep=4,dp=4", {}),
    "experts 2, copies 2": ("ep=2,dp=4", {}),
    "tensor 2": ("ep=2,dp=2,tp=2", {}),
    "sequence 2": ("ep=2,dp=2,tp=2,sp=true", {}),
    "pipeline 2": ("ep=2,dp=2,pp=2", {"num_layers": 4}),
    "zero bubble": ("ep=2,dp=2,pp=2,schedule=zero_bubble", {"num_layers": 4}),
    "ZeRO 1": ("ep=2,dp=4,zero=1", {}),
    "ZeRO 2": ("ep=2,dp=2,zero=2", {}),
    "ZeRO 3": ("ep=2,dp=4,zero=3", {}),
    "ZeRO 3, pipeline": ("ep=2,dp=2,pp=2,zero=3", {"num_layers": 4}),
    "recomputation": ("ep=2,dp=4,zero=3", _RECOMPUTED),
    "recomputation, sequence": ("ep=2,dp=2,tp=2,sp=true", _RECOMPUTED),
    "recomputation, pipeline": ("ep=2,dp=2,pp=2", _RECOMPUTED | {"num_layers": 4}),
    "adapters": ("ep=2,dp=2", _LORA),
    "adapters, sequence": ("ep=2,dp=2,tp=2,sp=true", _LORA),
    "adapters, pipeline": ("ep=2,dp=2,pp=2,zero=1", _LORA | {"num_layers": 4}),
    "adapters, recomputation": ("ep=2,dp=4,zero=3", _LORA | _RECOMPUTED),
}
CASES = [(model, layout) for model in range(_MODELS) for layout in LAYOUTS]


def drawn(number: int) -> dict[str, Any]:
    """The settings of a model with experts."""
    draw = random.Random(f"experts {number}")
    is_sinkhorn = draw.random() < 0.25
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 6,
        "pos_emb": draw.choice(["rotary", "alibi", "learned"]),
        "norm": draw.choice(["rmsnorm", "layernorm"]),
        "gpt_j_residual": draw.random() < 0.2,
        "activation": draw.choice(["gelu", "swiglu", "geglu", "relu"]),
        "moe_num_experts": draw.choice([4, 8]),
        "moe_top_k": draw.choice([1, 2, 3]),
        "moe_expert_interval": draw.choice([1, 1, 2]),
        "moe_expert_width": draw.choice([8, 16, 40]),
        "moe_scores": draw.choice(["auto", "softmax", "sigmoid"]),
        "moe_normalize_weights": draw.random() < 0.5,
        "moe_shared_width": draw.choice([0, 16]),
        "moe_router_z_loss": draw.choice([0.0, 0.05]),
        "moe_router_type": "sinkhorn" if is_sinkhorn else "topk",
    }
    settings["moe_shared_gate"] = bool(settings["moe_shared_width"]) and draw.random() < 0.5
    if not is_sinkhorn:
        settings |= {"moe_balance_loss": draw.choice([0.0, 0.1]), "moe_expert_bias": draw.random() < 0.5}
        settings["moe_balance_over"] = draw.choice(["sequence", "micro_batch", "batch"])
    return settings


def is_default(model: int, layout: str) -> bool:
    """Each layout with three models, and at least three layouts of each model."""
    return (list(LAYOUTS).index(layout) - model) % _MODELS in (0, 5, 9)


def of_this_part(model: int, layout: str) -> bool:
    if "PART" not in os.environ:
        return is_default(model, layout)
    part, parts = map(int, os.environ["PART"].split("/"))
    others = [case for case in CASES if not is_default(*case)]
    return (model, layout) in others[part - 1 :: parts]


def case_on(layout: str, settings: dict[str, Any], path: Path, *, precision: str) -> Case:
    of_layout, more = LAYOUTS[layout]
    is_exact = precision == "float64"
    given = {"engine": "torch"} | more | ({} if is_exact else {"precision": precision})
    if not is_exact and settings["activation"] == "relu":
        # Rounding decides on which side of 0 a value falls, and so whether it has a gradient: one process in
        # bfloat16 is then up to a quarter from float64, in float32 millionths.
        given["activation"] = "gelu"
    path.write_text(json.dumps(TINY | settings | given))
    wanted = LayoutVerification(
        paths=(str(path),), precision="float64" if is_exact else "configured", full=True
    )
    return case_of(wanted, of_layout)


def answer_on(model: int, layout: str, folder: Path, *, precision: str) -> LayoutAnswer:
    folder.mkdir()
    case = case_on(layout, drawn(model), folder / "settings.yml", precision=precision)
    return answer_of_ranks(run_ranks(rank_answer, timeout_seconds=600, **arguments_of(case, folder, steps=2)))


def is_rounding(answer: LayoutAnswer, single: LayoutAnswer) -> bool:
    """Whether gradients in bfloat16 are no further from float64 than float32's rounding errors make likely.

    Some draws of weights amplify rounding errors, of both alike; those of bfloat16 are 2 to the power of 16
    times larger. The largest errors are of single tensors, and may be twice as large by chance.
    """
    largest = max(part.worst for part in single.parts if part.name == "gradients")
    return single.agrees and all(
        part.name in ("gradients", "gradient norm") and part.worst <= 2 * 2**16 * largest
        for part in answer.parts
        if part.differing
    )


@pytest.mark.sweep
@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize(("model", "layout"), [case for case in CASES if of_this_part(*case)])
def test_experts_on_a_layout(model: int, layout: str, precision: str, tmp_path: Path) -> None:
    answer = answer_on(model, layout, tmp_path / "answer", precision=precision)
    assert len(answer.parts) >= 5
    if precision == "bfloat16" and not answer.agrees:
        single = answer_on(model, layout, tmp_path / "single", precision="fp32")
        assert is_rounding(answer, single), (answer.parts, single.parts)
        return
    assert [(part.name, part.worst) for part in answer.parts if part.differing] == []
    assert answer.findings == ()

"""`make sweep NAME=fields`: models of today's families compute on layouts what one process computes.

Each model has several fields of the specification, and is verified on three layouts, of which each has at
least one model; `PART=k/n` are the other models on each layout, in turn.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from neox_launcher.verify_layout.verify import LayoutVerification, case_of
from support.distributed import run_ranks
from support.layout_answers import answer_of_ranks, arguments_of, rank_answer
from support.settings import TINY

_SETTINGS = TINY | {"init_method_std": 0.1}
_LONGROPE = {"type": "longrope", "original_max_position_embeddings": 8}
_FACTORS = {"short_factor": [1.0, 0.5, 2.0, 1.0], "long_factor": [1.0, 4.0, 3.0, 1.5]}
MODELS: dict[str, dict[str, Any]] = {
    "sinks, longrope, windows, limited gates": {
        "num_layers": 4,
        "pos_emb": "rotary",
        "head_dim": 8,
        "num_kv_heads": 2,
        "norm": "rmsnorm",
        "attention_config": [[["sliding", "long"], "all"]],
        "attention_kinds": {
            "sliding": {"sliding_window_width": 4, "rotary_emb_base": 100},
            "long": {"rotary_scaling": _LONGROPE | _FACTORS},
        },
        "attention_sinks": True,
        "activation": "swiglu",
        "glu_limit": 0.4,
        "glu_alpha": 1.702,
        "glu_up_offset": 1.0,
        "z_loss": 0.1,
    },
    "limited scores and logits, norms on both sides": {
        "num_layers": 2,
        "pos_emb": "rotary",
        "norm": "rmsnorm",
        "norm_placement": "both",
        "norm_zero_centered": True,
        "qk_norm": "head",
        "attention_config": ["sliding", "full"],
        "attention_kinds": {
            "sliding": {"sliding_window_width": 4},
            "full": {"rotary_scaling": {"type": "linear", "factor": 2.0}},
        },
        "attention_scale": 0.7,
        "attention_softcap": 0.5,
        "embedding_scale": 1.7,
        "logit_softcap": 2.0,
        "activation": "geglu_tanh",
    },
    "norms of outputs and over all heads, gates of channels": {
        "num_layers": 2,
        "pos_emb": "rotary",
        "norm": "rmsnorm",
        "norm_placement": "after",
        "qk_norm": "width",
        "num_kv_heads": 2,
        "attention_config": ["nope", "global"],
        "attention_kinds": {"nope": {"pos_emb": "none"}},
        "attention_gate": "element",
        "no_weight_tying": True,
        "z_loss": 0.1,
        "logit_scale": 0.6,
    },
    "one norm for two sublayers, positions with an offset": {
        "num_layers": 2,
        "opt_pos_emb_offset": 2,
        "gpt_j_residual": True,
        "gpt_j_tied": True,
        "use_qk_layernorm": True,
        "attention_gate": "head",
        "attention_sinks": True,
        "activation": "squared_relu",
        "logit_scale": 0.6,
    },
    "norms without weights, alibi with limited scores": {
        "num_layers": 2,
        "pos_emb": "alibi",
        "norm": "non_parametric_layernorm",
        "qk_norm": "width",
        "head_dim": 5,
        "attention_scale": 0.7,
        "attention_softcap": 0.5,
        "embedding_scale": 1.7,
        "logit_softcap": 2.0,
        "z_loss": 0.1,
    },
}
_RECOMPUTED = {"checkpoint_activations": True, "checkpoint_num_layers": 1, "partition_activations": True}
_LORA = {"lora_rank": 2, "lora_alpha": 8.0, "lora_base": "not read here"}
# As after `--layout`, and other settings.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("tp=2,dp=1", {}),
    "sequence": ("tp=2,sp=true,dp=1", {}),
    "pipeline": ("pp=2,dp=1", {}),
    "ZeRO 1": ("zero=1,dp=2", {}),
    "ZeRO 2": ("zero=2,dp=2", {}),
    "ZeRO 3": ("zero=3,dp=2", {}),
    "DeepSpeed": ("tp=2,dp=1", {"engine": "deepspeed"}),
    "DeepSpeed, ZeRO 3": ("zero=3,dp=2", {"engine": "deepspeed"}),
    "recomputation": ("tp=2,dp=1", _RECOMPUTED),
    "adapters": ("tp=2,dp=1", _LORA),
}
CASES = [(model, layout) for model in MODELS for layout in LAYOUTS]


def is_default(model: str, layout: str) -> bool:
    """Three layouts of each model, and each layout at least once."""
    return (list(LAYOUTS).index(layout) - 2 * list(MODELS).index(model)) % len(LAYOUTS) in (0, 4, 7)


def of_this_part(model: str, layout: str) -> bool:
    if "PART" not in os.environ:
        return is_default(model, layout)
    part, parts = map(int, os.environ["PART"].split("/"))
    others = [case for case in CASES if not is_default(*case)]
    return (model, layout) in others[part - 1 :: parts]


@pytest.mark.sweep
@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize(("model", "layout"), [case for case in CASES if of_this_part(*case)])
def test_fields_of_a_model_on_a_layout(model: str, layout: str, precision: str, tmp_path: Path) -> None:
    of_layout, more = LAYOUTS[layout]
    is_exact = precision == "float64"
    if is_exact and "engine" in more:
        pytest.skip("DeepSpeed's engine does not compute in float64")
    path = tmp_path / "settings.yml"
    # In 16 bits, rounding decides whether a gate near its limit has a gradient.
    given = {"engine": "torch"} | more | ({} if is_exact else {"precision": precision, "glu_limit": 7.0})
    path.write_text(json.dumps(_SETTINGS | MODELS[model] | given))
    wanted = LayoutVerification(paths=(str(path),), precision="float64" if is_exact else "configured")
    case = case_of(wanted, of_layout)
    answer = answer_of_ranks(
        run_ranks(rank_answer, timeout_seconds=600, **arguments_of(case, tmp_path, steps=2))
    )
    assert [(part.name, part.worst) for part in answer.parts if part.differing] == []
    assert answer.findings == ()
    assert len(answer.parts) >= 5

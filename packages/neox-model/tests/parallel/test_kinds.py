"""Every kind of layer on two tensor-parallel ranks is the layer of one: losses and gradients of models."""

from typing import Any

import torch
from torch import Tensor, nn

from neox_model.assembly.model import build_model
from neox_model.layers.experts import ExpertBlocks, looped_product
from neox_model.parallel.groups import SINGLE_PROCESS, Groups
from neox_model.parallel.logical import named_logical_parameters
from neox_model.parallel.topology import create_groups
from support.distributed import run_ranks
from support.settings import specs_from

# Eleven tokens: two ranks need a padding row.
VOCAB, LENGTH = 11, 12

CASES: dict[str, dict[str, Any]] = {
    "heads with different layouts": {
        "attention_config": [[["sparse_fixed", "bigbird", "sparse_variable"], 1]],
        "sparsity_config": {
            "block": 1,
            "num_random_blocks": 2,
            "different_layout_per_head": True,
            "num_different_global_patterns": 4,
        },
        "pos_emb": "rpe",
    },
    "one layout for all, alibi": {
        "attention_config": [[["bslongformer", "local", "global"], 1]],
        "sparsity_config": {"block": 2},
        "pos_emb": "alibi",
    },
    "gmlp and amlp": {"attention_config": [[["gmlp", "amlp", "global"], 1]], "gmlp_attn_dim": 5},
    "gmlp, other norm and residual": {
        "attention_config": [[["gmlp", "amlp", "gmlp"], 1]],
        "norm": "rmsnorm",
        "apply_residual_connection_post_layernorm": True,
        "use_bias_in_mlp": False,
    },
    "shared keys without biases": {
        "num_kv_heads": 2,
        "pos_emb": "rotary",
        "activation": "swiglu",
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
    },
    "wide heads, limited scores, sinks, a gate per head": {
        "num_kv_heads": 2,
        "head_dim": 6,
        "attention_scale": 0.7,
        "attention_softcap": 1.5,
        "attention_sinks": True,
        "attention_gate": "head",
        "pos_emb": "alibi",
        "gpt_j_residual": True,
    },
    "split sequence, sinks, a gate per channel": {
        "sequence_parallel": True,
        "attention_sinks": True,
        "attention_gate": "element",
        "attention_config": [[["global", "local", "bigbird"], 1]],
        "sparsity_config": {"block": 4},
        "pos_emb": "rotary",
    },
    "documents, windows and rotary embeddings by kind": {
        "pos_emb": "rotary",
        "rotary_pct": 0.5,
        "attention_config": ["sliding", "nope", "full"],
        "attention_kinds": {
            "sliding": {"sliding_window_width": 3, "rotary_emb_base": 10},
            "nope": {"pos_emb": "none"},
            "full": {"rotary_scaling": {"type": "longrope", "short_factor": [2.0], "long_factor": [3.0]}},
        },
    },
    "documents": {"attention_config": [[["global", "amlp", "local"], 1]], "sparsity_config": {"block": 3}},
    **{
        f"{name}{', split sequence' if splits else ''}": settings | {"sequence_parallel": splits}
        for name, settings in {
            "gated experts, one for all with a gate, balance": {
                "moe_num_experts": 5,
                "moe_top_k": 2,
                "moe_router_type": "topk",
                "moe_normalize_weights": True,
                "moe_shared_width": 8,
                "moe_shared_gate": True,
                "moe_balance_loss": 0.3,
                "moe_router_z_loss": 0.1,
                "activation": "swiglu",
                "pos_emb": "rotary",
            },
            "experts with biases and limits, in groups": {
                "moe_num_experts": 6,
                "moe_top_k": 2,
                "moe_router_type": "topk",
                "moe_normalize_weights": True,
                "moe_weight_scale": 1.5,
                "moe_router_bias": True,
                "use_bias_in_experts": True,
                "moe_groups": 3,
                "moe_top_groups": 2,
                "moe_shared_width": 8,
                "activation": "swiglu",
                "glu_limit": 0.4,
                "glu_alpha": 1.702,
                "glu_up_offset": 1.0,
                "pos_emb": "rotary",
            },
            "experts with biases, without gates": {"moe_num_experts": 3, "use_bias_in_experts": True},
            **{
                f"experts balanced over the {over}": {
                    "moe_num_experts": 4,
                    "moe_router_type": "topk",
                    "moe_scores": "sigmoid",
                    "moe_balance_loss": 2.0,
                    "moe_balance_over": over,
                }
                for over in ("micro_batch", "batch")
            },
            "experts by sinkhorn, parallel residual": {
                "moe_num_experts": 3,
                "moe_expert_interval": 2,
                "gpt_j_residual": True,
            },
        }.items()
        for splits in (False, True)
    },
    "split sequence": {
        "sequence_parallel": True,
        "attention_config": [[["local", "amlp", "gmlp"], 1]],
        "sparsity_config": {"block": 4},
        "pos_emb": "rpe",
    },
    **{
        f"{norm}, queries and keys by {form}{', split sequence' if splits else ''}": {
            "norm": norm,
            "pos_emb": "rotary",
            **({"use_qk_layernorm": True} if form == "both" else {"qk_norm": form, "num_kv_heads": 2}),
            "sequence_parallel": splits,
        }
        for norm in ("layernorm", "rmsnorm", "scalenorm", "non_parametric_layernorm")
        for form in ("head", "width", "both")
        for splits in (False, True)
    },
    **{
        f"{name}{', split sequence' if splits else ''}": settings | {"sequence_parallel": splits}
        for name, settings in {
            "norms of outputs": {"norm_placement": "after", "norm": "rmsnorm", "norm_zero_centered": True},
            "norms on both sides": {"norm_placement": "both", "norm_zero_centered": True, "qk_norm": "head"},
            "one norm for both branches": {"gpt_j_residual": True, "gpt_j_tied": True},
            "one norm, gated": {"gpt_j_residual": True, "gpt_j_tied": True, "activation": "swiglu"},
        }.items()
        for splits in (False, True)
    },
}


def loss_of(model: nn.Module, *, has_documents: bool) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=generator)
    inputs: Any = tokens[:, :-1]
    if has_documents:
        documents = torch.tensor([[0] * 5 + [1] * 7, [0, 1, 1] + [2] * 9])
        inputs = (inputs, documents, torch.arange(LENGTH).expand(2, LENGTH))
    return model.loss_fn(model(inputs).float(), (tokens[:, 1:], torch.full((2, LENGTH), 0.5 / LENGTH)))


def moved(name: str, whole: Tensor) -> Tensor:
    """Numbers to add to a parameter, so that what starts at 0 or 1 shows mistakes, too."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return 0.2 * torch.randn(whole.shape, generator=generator)


def check(settings: dict[str, Any], groups: Groups, *, has_documents: bool) -> None:
    single = {**settings, "model_parallel_size": 1, "sequence_parallel": False}
    # In float64 up to the loss, so that no difference is one of rounding.
    whole = build_model(*specs_from(single), SINGLE_PROCESS, vocab_size=VOCAB).double()
    part = build_model(*specs_from(settings, devices=2), groups, vocab_size=VOCAB).double()
    # The grouped product does not compute in float64.
    for module in (*whole.modules(), *part.modules()):
        if isinstance(module, ExpertBlocks):
            module.product = looped_product
    ours = dict(named_logical_parameters(part))
    with torch.no_grad():
        for name, parameter in named_logical_parameters(whole):
            parameter += moved(name, parameter)
            block = parameter[tuple(slice(*limits) for limits in ours[name].logical.slices)]
            ours[name][tuple(slice(0, length) for length in block.shape)] = block
    losses = [loss_of(model, has_documents=has_documents) for model in (whole, part)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for name, parameter in named_logical_parameters(whole):
        expected = parameter.grad[tuple(slice(*limits) for limits in ours[name].logical.slices)]
        given = ours[name].grad[tuple(slice(0, length) for length in expected.shape)]
        torch.testing.assert_close(
            given, expected, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def all_cases() -> list[str]:
    groups = create_groups(2, 0)
    for case, settings in CASES.items():
        try:
            check({**settings, "model_parallel_size": 2}, groups, has_documents=case.startswith("documents"))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    return list(CASES)


def test_two_ranks_equal_one():
    assert run_ranks(all_cases, size=2) == [list(CASES)] * 2

"""Architectures that every layout must train, as plain settings of a model of five layers."""

from typing import Any

__all__ = ["ARCHITECTURES", "EXPERTS", "SMALL", "WIDE"]

# Six heads of four in fifteen tokens; four ranks, or ranks that share the sequence, want sizes they divide.
SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 6,
    "seq_length": 15,
    "max_position_embeddings": 15,
}
WIDE: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 12,
    "seq_length": 12,
    "max_position_embeddings": 12,
}


def _attention(*kinds: str, **sparsity: Any) -> dict[str, Any]:
    return {"attention_config": [[list(kinds), 1], [["global"], 5 - len(kinds)]]} | (
        {"sparsity_config": {"block": 3, **sparsity}} if sparsity else {}
    )


# Micro-batches of layouts differ, and so do the numbers of masked tokens in them.
MASKED: dict[str, Any] = {"objective": "masked", "mask_prob": 0.3, "loss_normalization": "global"}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "learned positions, layernorm, tied": {},
    "scaled embeddings, scaled and capped logits, z-loss, clamped gates": {
        "embedding_scale": 1.7,
        "logit_scale": 0.6,
        "logit_softcap": 2.0,
        "z_loss": 0.1,
        "activation": "swiglu",
        "glu_limit": 0.4,
        "glu_alpha": 1.702,
        "glu_up_offset": 1.0,
    },
    "half rotary, parallel residual, untied": {
        "pos_emb": "rotary",
        "rotary_pct": 0.5,
        "gpt_j_residual": True,
        "no_weight_tying": True,
    },
    "adapters": {
        "lora_rank": 4,
        "lora_alpha": 32,
        "lora_base": "not read here",
        "activation": "swiglu",
        "pos_emb": "rotary",
    },
    "norms of outputs, of queries and keys over all heads": {
        "pos_emb": "rotary",
        "norm": "rmsnorm",
        "norm_placement": "after",
        "qk_norm": "width",
        "num_kv_heads": "half",
    },
    "norms on both sides and of heads, weights minus 1": {
        "pos_emb": "rotary",
        "norm_placement": "both",
        "norm_zero_centered": True,
        "qk_norm": "head",
    },
    "parallel residual with one norm, as of queries and keys": {
        "gpt_j_residual": True,
        "gpt_j_tied": True,
        "use_qk_layernorm": True,
    },
    "limited scores, sinks and gates, heads of another width": {
        "pos_emb": "rotary",
        "head_dim": 6,
        "num_kv_heads": "half",
        "attention_scale": 0.7,
        "attention_softcap": 0.5,
        "attention_sinks": True,
        "attention_gate": "element",
    },
    "shared layers": {"num_layers": 4, "num_unique_layers": 2, "param_sharing_style": "grouped"},
    "grouped queries, rmsnorm, swiglu, no biases": {
        "pos_emb": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "num_kv_heads": "half",
        "init_method": "small_init",
        "output_layer_init_method": "wang_init",
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
        "no_weight_tying": True,
    },
    "shared layers, spaced, gelu's tanh": {
        "num_layers": 4,
        "num_unique_layers": 2,
        "param_sharing_style": "spaced",
        "openai_gelu": True,
        "no_weight_tying": True,
        "pos_emb": "rotary",
        "rotary_pct": 0.5,
    },
    "sinusoidal positions, scalenorm, geglu": {
        "pos_emb": "sinusoidal",
        "norm": "scalenorm",
        "activation": "geglu",
        "init_method": "orthogonal",
        "output_layer_init_method": "orthogonal",
    },
    "alibi, residual after the norm, mish": {
        "pos_emb": "alibi",
        "apply_residual_connection_post_layernorm": True,
        "activation": "mish",
    },
    "relative positions, local attention, relu": {
        "pos_emb": "rpe",
        "rpe_num_buckets": 8,
        "rpe_max_distance": 10,
        "activation": "relu",
        **_attention("local", "global", "local", num_sliding_window_blocks=1),
    },
    "fixed and Longformer patterns, softsign": {
        "pos_emb": "none",
        "activation": "softsign",
        **_attention("sparse_fixed", "bslongformer", num_local_blocks=2),
    },
    "BigBird and variable patterns, rotary": {
        "pos_emb": "rotary",
        **_attention("bigbird", "sparse_variable", num_random_blocks=1, different_layout_per_head=True),
    },
    "gMLP": {"pos_emb": "none", **_attention("gmlp", "gmlp", "gmlp")},
    "aMLP": {"gmlp_attn_dim": 8, **_attention("amlp", "global", "amlp")},
    "masked, rotary, documents and padding": {
        **MASKED,
        "pos_emb": "rotary",
        "short_seq_prob": 0.4,
        "reset_attention_mask": True,
    },
    "masked, buckets, patterns in both directions": {
        **MASKED,
        "pos_emb": "rpe",
        "rpe_num_buckets": 8,
        "rpe_max_distance": 10,
        "short_seq_prob": 0.0,
        **_attention("local", "bigbird", "sparse_fixed", num_local_blocks=2, num_random_blocks=1),
    },
    "masked, gMLP, padding": {
        **MASKED,
        "pos_emb": "none",
        "short_seq_prob": 0.4,
        **_attention("gmlp", "global", "amlp"),
        "gmlp_attn_dim": 8,
    },
    "windows and rotary embeddings by kind": {
        "pos_emb": "rotary",
        "attention_config": ["sliding", "nope", "full", "long", "global"],
        "attention_kinds": {
            "sliding": {"sliding_window_width": 4, "rotary_emb_base": 100},
            "nope": {"pos_emb": "none"},
            "full": {"rotary_scaling": {"type": "linear", "factor": 2.0}},
            "long": {
                "rotary_scaling": {
                    "type": "longrope",
                    "original_max_position_embeddings": 10,
                    "short_factor": [1.0, 0.25],
                    "long_factor": [1.5, 4.0],
                }
            },
        },
    },
    "layer scaling with scores, swish": {
        "opt_pos_emb_offset": 2,
        "apply_query_key_layer_scaling": True,
        "attention_softmax_in_fp32": True,
        "activation": "swish",
        "init_method": "xavier_uniform",
        "output_layer_init_method": "scaled_orthogonal",
    },
}

# In a table of their own: layouts of DeepSpeed refuse them.
EXPERTS: dict[str, dict[str, Any]] = {
    "gated experts in some layers, balanced, and one for all": {
        "pos_emb": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "moe_num_experts": 5,
        "moe_top_k": 2,
        "moe_layers": [1, 2, 4],
        "moe_router_type": "topk",
        "moe_scores": "sigmoid",
        "moe_normalize_weights": True,
        "moe_balance_loss": 0.1,
        "moe_router_z_loss": 0.01,
        "moe_expert_bias": True,
        "moe_shared_width": 16,
        "moe_shared_gate": True,
    },
    "experts with biases and limits, in groups, as in gpt-oss and DeepSeek": {
        "pos_emb": "rotary",
        "attention_sinks": True,
        "activation": "swiglu",
        "glu_limit": 0.4,
        "glu_alpha": 1.702,
        "glu_up_offset": 1.0,
        "moe_num_experts": 6,
        "moe_top_k": 3,
        "moe_router_type": "topk",
        "moe_normalize_weights": True,
        "moe_weight_scale": 1.5,
        "moe_router_bias": True,
        "use_bias_in_experts": True,
        "moe_groups": 3,
        "moe_top_groups": 2,
    },
    "experts chosen by sinkhorn": {"pos_emb": "rotary", "moe_num_experts": 4, "moe_expert_interval": 2},
    "experts balanced over micro-batches, a shared one without a gate": {
        "pos_emb": "rotary",
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_router_type": "topk",
        "moe_balance_loss": 0.5,
        "moe_balance_over": "micro_batch",
        "moe_shared_width": 24,
    },
    "experts balanced over the batch, parallel residual": {
        "pos_emb": "rotary",
        "gpt_j_residual": True,
        "moe_num_experts": 4,
        "moe_expert_interval": 2,
        "moe_router_type": "topk",
        "moe_balance_loss": 0.5,
        "moe_balance_over": "batch",
    },
    # Of which some have no token: a micro-batch has at most 60.
    "many experts": {
        "norm": "rmsnorm",
        "moe_num_experts": 64,
        "moe_layers": [1, 3],
        "moe_router_type": "topk",
        "moe_expert_width": 8,
    },
}

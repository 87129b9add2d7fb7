"""The models of the catalogue against published config.json files, and against models that are built."""

import re
from collections.abc import Mapping
from math import prod
from typing import Any

import pytest
import torch
import transformers

from neox_config.catalogue import PUBLISHED, find_model
from neox_config.estimate.parameters import active_parameters, count_parameters
from neox_model.convert.checkpoints import tensor_shapes
from neox_model.convert.differences import differences
from neox_model.convert.families import family_of_config
from neox_model.convert.reference import meta_model
from support.tiers import slow_except

Config = Mapping[str, Any]


def gpt_neox(layers: int, width: int, heads: int, rows: int, act: str = "gelu") -> Config:
    return {
        "model_type": "gpt_neox",
        "hidden_act": act,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "vocab_size": rows,
    }


def gpt2(layers: int, width: int, heads: int) -> Config:
    return {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_embd": width,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


def llama(sizes: tuple[int, ...], rows: int, positions: int, eps: float = 1e-5, **others: Any) -> Config:
    layers, width, heads, kv_heads, mlp_width = sizes
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": mlp_width,
        "max_position_embeddings": positions,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": eps,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": rows,
        **others,
    }


def llama_3(*sizes: int, factor: float | None = None, tied: bool = False) -> Config:
    scaling = {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return llama(
        sizes,
        128256,
        131072 if factor else 8192,
        rope_theta=500000.0,
        rope_scaling=scaling if factor else None,
        tie_word_embeddings=tied,
    )


def mistral(rows: int, base: float, window: int | None) -> Config:
    sizes = (32, 4096, 32, 8, 14336)
    return llama(sizes, rows, 32768, rope_theta=base, sliding_window=window, model_type="mistral")


def qwen2(*sizes: int, rows: int, eps: float = 1e-6, tied: bool = False) -> Config:
    windows = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
    base = {"rope_theta": 1000000.0, "tie_word_embeddings": tied, "model_type": "qwen2"}
    return llama(sizes, rows, 131072, eps, **base, **windows)


def qwen3(*sizes: int, tied: bool = False) -> Config:
    windows = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": sizes[0]}
    others = {"head_dim": 128, "rope_theta": 1000000.0, "attention_bias": False, **windows}
    return llama(sizes, 151936, 40960, 1e-6, tie_word_embeddings=tied, model_type="qwen3", **others)


def olmo2(*sizes: int) -> Config:
    return llama(sizes, 100352, 4096, 1e-6, rope_theta=500000.0, model_type="olmo2")


def olmo3(*sizes: int) -> Config:
    scaling = {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    }
    kinds = [*["sliding_attention"] * 3, "full_attention"] * (sizes[0] // 4)
    others = {"rope_theta": 500000.0, "rope_scaling": scaling, "sliding_window": 4096, "layer_types": kinds}
    return llama(sizes, 100278, 65536, 1e-6, model_type="olmo3", **others)


def gemma(kind: str, sizes: tuple[int, ...], rows: int, positions: int, **others: Any) -> Config:
    shared = {
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    }
    return llama(sizes, rows, positions, 1e-6, model_type=kind, **{**shared, **others})


def gemma2(*sizes: int, **others: Any) -> Config:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return gemma("gemma2", sizes, 256000, 8192, sliding_window=4096, **caps, **others)


def gemma3(*sizes: int) -> Config:
    rotary = {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0}
    windows = {"sliding_window": 512, "sliding_window_pattern": 6}
    return gemma("gemma3_text", sizes, 262144, 32768, **rotary, **windows)


def smollm3(*sizes: int) -> Config:
    others = {"rope_theta": 5000000.0, "no_rope_layers": [1, 1, 1, 0] * 9, "use_sliding_window": False}
    tied = {"tie_word_embeddings": True, "model_type": "smollm3"}
    return llama(sizes, 128256, 65536, 1e-6, **tied, **others)


def phi3(*sizes: int, rows: int = 32064, positions: int = 4096, **others: Any) -> Config:
    shared = {"sliding_window": 2047, "original_max_position_embeddings": positions, "model_type": "phi3"}
    return llama(sizes, rows, positions, **{**shared, **others})


def opt(layers: int, width: int, heads: int) -> Config:
    return {
        "model_type": "opt",
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "ffn_dim": 4 * width,
        "hidden_size": width,
        "max_position_embeddings": 2048,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "vocab_size": 50272,
        "word_embed_proj_dim": width,
    }


def gpt_oss(layers: int, experts: int) -> Config:
    scaling = {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    }
    others = {
        "attention_bias": True,
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "num_experts_per_tok": 4,
        "num_local_experts": experts,
        "rope_scaling": scaling,
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    }
    return llama((layers, 2880, 64, 8, 2880), 201088, 131072, model_type="gpt_oss", **others)


def mixtral(*sizes: int, positions: int) -> Config:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    return llama(sizes, 32000, positions, rope_theta=1000000.0, model_type="mixtral", **experts)


def olmoe(*sizes: int) -> Config:
    experts = {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None}
    return llama(sizes, 50304, 4096, 1e-5, model_type="olmoe", **experts)


def qwen2_moe(*sizes: int) -> Config:
    experts = {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "decoder_sparse_step": 1,
        "max_window_layers": 21,
        "sliding_window": 32768,
        "use_sliding_window": False,
    }
    return llama(sizes, 151936, 8192, 1e-6, rope_theta=1000000.0, model_type="qwen2_moe", **experts)


def qwen3_moe(*sizes: int, width: int) -> Config:
    experts = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "moe_intermediate_size": width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return qwen3(*sizes) | experts | {"model_type": "qwen3_moe"}


# What determines the architecture in the config.json that was published with the weights.
CONFIG_JSON: Mapping[str, Config] = {
    "gpt-neox-20b": gpt_neox(44, 6144, 64, 50432, act="gelu_fast"),
    "pythia-14m": gpt_neox(6, 128, 4, 50304),
    "pythia-31m": gpt_neox(6, 256, 8, 50304),
    "pythia-70m": gpt_neox(6, 512, 8, 50304),
    "pythia-160m": gpt_neox(12, 768, 12, 50304),
    "pythia-410m": gpt_neox(24, 1024, 16, 50304),
    "pythia-1b": gpt_neox(16, 2048, 8, 50304),
    "pythia-1.4b": gpt_neox(24, 2048, 16, 50304),
    "pythia-2.8b": gpt_neox(32, 2560, 32, 50304),
    "pythia-6.9b": gpt_neox(32, 4096, 32, 50432),
    "pythia-12b": gpt_neox(36, 5120, 40, 50688),
    "gpt2": gpt2(12, 768, 12),
    "gpt2-medium": gpt2(24, 1024, 16),
    "gpt2-large": gpt2(36, 1280, 20),
    "gpt2-xl": gpt2(48, 1600, 25),
    "llama-2-7b": llama((32, 4096, 32, 32, 11008), 32000, 4096),
    "llama-2-13b": llama((40, 5120, 40, 40, 13824), 32000, 4096),
    "llama-2-70b": llama((80, 8192, 64, 8, 28672), 32000, 4096),
    "llama-3-8b": llama_3(32, 4096, 32, 8, 14336),
    "llama-3-70b": llama_3(80, 8192, 64, 8, 28672),
    "llama-3.1-8b": llama_3(32, 4096, 32, 8, 14336, factor=8.0),
    "llama-3.1-70b": llama_3(80, 8192, 64, 8, 28672, factor=8.0),
    "llama-3.2-1b": llama_3(16, 2048, 32, 8, 8192, factor=32.0, tied=True),
    "llama-3.2-3b": llama_3(28, 3072, 24, 8, 8192, factor=32.0, tied=True),
    "mistral-7b-v0.1": mistral(32000, 10000.0, 4096),
    "mistral-7b-v0.3": mistral(32768, 1000000.0, None),
    "qwen2-0.5b": qwen2(24, 896, 14, 2, 4864, rows=151936, tied=True),
    "qwen2-1.5b": qwen2(28, 1536, 12, 2, 8960, rows=151936, tied=True),
    "qwen2-7b": qwen2(28, 3584, 28, 4, 18944, rows=152064),
    "qwen2-72b": qwen2(80, 8192, 64, 8, 29568, rows=152064, eps=1e-5),
    "qwen3-0.6b": qwen3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-1.7b": qwen3(28, 2048, 16, 8, 6144, tied=True),
    "qwen3-4b": qwen3(36, 2560, 32, 8, 9728, tied=True),
    "qwen3-8b": qwen3(36, 4096, 32, 8, 12288),
    "qwen3-14b": qwen3(40, 5120, 40, 8, 17408),
    "qwen3-32b": qwen3(64, 5120, 64, 8, 25600),
    "olmo-2-1b": olmo2(16, 2048, 16, 16, 8192),
    "olmo-2-7b": olmo2(32, 4096, 32, 32, 11008),
    "olmo-2-13b": olmo2(40, 5120, 40, 40, 13824),
    "olmo-2-32b": olmo2(64, 5120, 40, 8, 27648),
    "olmo-3-7b": olmo3(32, 4096, 32, 32, 11008),
    "olmo-3-32b": olmo3(64, 5120, 40, 8, 27648),
    "gemma-2-2b": gemma2(26, 2304, 8, 4, 9216),
    "gemma-2-9b": gemma2(42, 3584, 16, 8, 14336),
    "gemma-2-27b": gemma2(46, 4608, 32, 16, 36864, head_dim=128, query_pre_attn_scalar=144),
    "gemma-3-270m": gemma3(18, 640, 4, 1, 2048),
    "gemma-3-1b": gemma3(26, 1152, 4, 1, 6912),
    "smollm3-3b": smollm3(36, 2048, 16, 4, 11008),
    "phi-3-mini-4k": phi3(32, 3072, 32, 32, 8192),
    "phi-3-medium-4k": phi3(40, 5120, 40, 10, 17920),
    "phi-4": phi3(
        *(40, 5120, 40, 10, 17920), rows=100352, positions=16384, rope_theta=250000.0, sliding_window=None
    ),
    "opt-125m": opt(12, 768, 12),
    "opt-1.3b": opt(24, 2048, 32),
    "opt-2.7b": opt(32, 2560, 32),
    "opt-6.7b": opt(32, 4096, 32),
    "opt-13b": opt(40, 5120, 40),
    "opt-30b": opt(48, 7168, 56),
    "gpt-oss-20b": gpt_oss(24, 32),
    "gpt-oss-120b": gpt_oss(36, 128),
    "mixtral-8x7b-v0.1": mixtral(32, 4096, 32, 8, 14336, positions=32768),
    "mixtral-8x22b-v0.1": mixtral(56, 6144, 48, 8, 16384, positions=65536),
    "olmoe-1b-7b": olmoe(16, 2048, 16, 16, 1024),
    "qwen1.5-moe-a2.7b": qwen2_moe(24, 2048, 16, 16, 5632),
    "qwen3-30b-a3b": qwen3_moe(48, 2048, 32, 4, 6144, width=768),
    "qwen3-235b-a22b": qwen3_moe(94, 4096, 64, 4, 12288, width=1536),
}
EXPERTS = tuple(name for name, published in PUBLISHED.items() if published.active is not None)
# One of each class.
BUILT = (
    *("pythia-160m", "gpt2-medium", "llama-3.2-1b", "mistral-7b-v0.1", "qwen2-0.5b", "qwen3-0.6b"),
    *("olmo-2-1b", "olmo-3-7b", "gemma-2-2b", "gemma-3-270m", "smollm3-3b", "phi-3-mini-4k", "opt-125m"),
    "gpt-oss-20b",
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_the_architecture_of_its_config_json(name):
    config = CONFIG_JSON[name]
    theirs = family_of_config(config).read(config)
    found = [str(each) for each in differences(find_model(name).resolved.model, theirs)]
    # Pythia's config.json has the erf form of gelu; its training computed the tanh form.
    trained = ["activation: gelu_tanh (there: gelu)"] if name.startswith("pythia") else []
    assert (found, PUBLISHED[name].rows) == (trained, config["vocab_size"])


@pytest.mark.parametrize("name", BUILT)
def test_transformers_reads_the_same_architecture_from_the_config_json(name):
    config = CONFIG_JSON[name]
    theirs = transformers.AutoConfig.for_model(**config).to_dict()
    family = family_of_config(config)
    assert differences(family.read(theirs), family.read(config)) == []


def test_a_difference_from_the_config_json_is_found():
    config = {**CONFIG_JSON["mistral-7b-v0.1"], "sliding_window": 4095}
    theirs = family_of_config(config).read(config)
    (found,) = differences(find_model("mistral-7b-v0.1").resolved.model, theirs)
    assert re.search(r"sliding-window-width.*: 4095 \(there: 4094\)$", found)


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 3.6), ("gpt-oss-120b", 5.1)])
def test_the_active_parameters_of_a_mixture_are_those_that_were_published(name, billions):
    """Published without those of the embedding."""
    model, published = find_model(name).resolved.model, PUBLISHED[name]
    active = active_parameters(model, published.rows) - published.rows * model.width
    assert round(active / 1e9, 1) == billions
    assert sum(count_parameters(model, published.rows).values()) == published.parameters


@pytest.mark.parametrize("name", slow_except(BUILT, "pythia-160m", "gpt2-medium", "gemma-3-270m"))
def test_the_count_is_that_of_the_model_that_is_built_and_of_transformers(name):
    published, config = PUBLISHED[name], CONFIG_JSON[name]
    resolved = find_model(name).resolved
    shapes = tensor_shapes(resolved.model, resolved.run, published.rows)
    assert sum(map(prod, shapes.values())) == published.parameters
    family = family_of_config(config)
    theirs = meta_model(transformers.AutoConfig.for_model(**config), family)
    assert sum(each.numel() for each in theirs.parameters()) == published.parameters


@pytest.mark.parametrize("name", EXPERTS)
def test_the_counts_of_a_model_with_experts_are_those_of_transformers(name):
    published, config = PUBLISHED[name], CONFIG_JSON[name]
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(made)
    sizes = {key: each.numel() for key, each in theirs.named_parameters()}
    assert sum(sizes.values()) == published.parameters
    number = config.get("num_experts", config.get("num_local_experts"))
    of_experts = sum(size for key, size in sizes.items() if ".mlp.experts." in key)
    unused = of_experts * (number - config["num_experts_per_tok"]) // number
    assert published.parameters - unused == published.active

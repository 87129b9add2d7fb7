"""The models of the catalogue against published config.json files, and against models that are built."""

from collections.abc import Mapping
from math import prod
from typing import Any

import pytest
import transformers

from neox_config.catalogue import PUBLISHED, find_model
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
}
# One of each class.
BUILT = ("pythia-160m", "gpt2-medium", "llama-3.2-1b", "mistral-7b-v0.1", "qwen2-0.5b")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_the_architecture_of_its_config_json(name):
    config = CONFIG_JSON[name]
    theirs = family_of_config(config).read(config)
    found = [str(each) for each in differences(find_model(name).resolved.model, theirs)]
    # Pythia's config.json has the erf form of gelu; its training computed the tanh form.
    trained = ["activation: gelu_tanh (there: gelu)"] if name.startswith("pythia") else []
    assert (found, PUBLISHED[name].rows) == (trained, config["vocab_size"])


def test_a_difference_from_the_config_json_is_found():
    config = {**CONFIG_JSON["mistral-7b-v0.1"], "sliding_window": 4095}
    theirs = family_of_config(config).read(config)
    (found,) = differences(find_model("mistral-7b-v0.1").resolved.model, theirs)
    assert "sliding-window-width" in found.option
    assert (found.value, found.theirs) == ("4095", "4094")


@pytest.mark.parametrize("name", slow_except(BUILT, "pythia-160m", "gpt2-medium", "qwen2-0.5b"))
def test_the_count_is_that_of_the_model_that_is_built_and_of_transformers(name):
    published, config = PUBLISHED[name], CONFIG_JSON[name]
    resolved = find_model(name).resolved
    shapes = tensor_shapes(resolved.model, resolved.run, published.rows)
    assert sum(map(prod, shapes.values())) == published.parameters
    family = family_of_config(config)
    theirs = meta_model(transformers.AutoConfig.for_model(**config), family)
    assert sum(each.numel() for each in theirs.parameters()) == published.parameters

"""Small random models of transformers, with a tokenizer, in folders."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from neox_config.facts.hugging_face import CLASSES

__all__ = [
    "DENSE",
    "EXPERTS",
    *("ENTRIES", "FAMILIES", "SMALL"),
    *("plain_settings", "random_settings", "write_model", "write_tokenizer"),
]

FAMILIES = tuple(CLASSES)
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")
DENSE = tuple(family for family in FAMILIES if family not in EXPERTS)
"""Those whose matrices peft adapts."""
ENTRIES = 280
SMALL = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
    "vocab_size": ENTRIES,
}
"""Settings of the smallest model."""
_FEW: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 8, "sliding_window": 0,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
_GPT2 = {"n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": ENTRIES}


# transformers uses this pretokenization for every model of the class Qwen2, whatever its tokenizer.json has.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@cache
def _tokenizer(family: str) -> str:
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if family == "qwen2":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated")
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ENTRIES,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()] * 3, trainer)
    assert tokenizer.get_vocab_size() == ENTRIES
    return tokenizer.to_str()


def write_tokenizer(folder: Path, family: str = "llama") -> Path:
    """Write a tokenizer.json of 280 entries with its settings, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer(family))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"


def plain_settings(family: str) -> dict[str, Any]:
    """Return arguments of the smallest configuration of a class, without windows."""
    if family == "gpt2":
        return dict(_GPT2)
    if family == "opt":
        return {name: value for name, value in SMALL.items() if name != "intermediate_size"} | {"ffn_dim": 20}
    settings = {**SMALL, "num_key_value_heads": 2}
    # These classes compute nothing with a cache if they have no window.
    with_types = ("olmo3", "gemma2", "gemma3_text", "gpt_oss")
    settings |= {"layer_types": ["full_attention"]} if family in with_types else {"sliding_window": None}
    settings |= {"head_dim": 8} if family in ("qwen3", "gemma2", "gemma3_text", "gpt_oss") else {}
    return settings | _FEW.get(family, {})


def random_settings(family: str, seed: int) -> dict[str, Any]:
    """Return arguments of a configuration of a class: sizes, and every option that can be converted."""
    draw = random.Random(f"{family} {seed}")
    heads = draw.choice([1, 2, 3, 4, 6])
    width = heads * draw.choice([4, 8, 12])
    length = draw.choice([16, 33, 48])
    layers = draw.choice([1, 2, 3])
    tied = draw.random() < 0.5
    inner = draw.choice([20, 37, 64])
    vocab = ENTRIES + draw.choice([0, 0, 1, 20])
    if family == "gpt2":
        return {
            "n_embd": width, "n_head": heads, "n_layer": layers, "n_positions": length, "vocab_size": vocab,
            "n_inner": draw.choice([None, inner]), "tie_word_embeddings": tied,
            "activation_function": draw.choice(["gelu_new", "gelu", "relu", "silu"]),
            "layer_norm_epsilon": draw.choice([1e-5, 1e-4]),
        }  # fmt: skip
    settings: dict[str, Any] = {
        "hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers, "vocab_size": vocab,
        "max_position_embeddings": length, "intermediate_size": inner, "tie_word_embeddings": tied,
    }  # fmt: skip
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": draw.choice([10000.0, 500000.0, 777.0])}
    rope |= draw.choice(
        [
            {},
            {},
            {"rope_type": "linear", "factor": 2.0},
            {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        ]
    )  # fmt: skip
    if family == "gpt_neox":
        rope["partial_rotary_factor"] = draw.choice([0.5, 1.0])
        return settings | {
            "rope_parameters": rope,
            "use_parallel_residual": draw.random() < 0.5,
            "attention_bias": draw.random() < 0.7,
            "hidden_act": draw.choice(["gelu", "gelu_new", "relu"]),
            "layer_norm_eps": draw.choice([1e-5, 1e-4]),
        }
    if family == "opt":
        settings["ffn_dim"] = settings.pop("intermediate_size")
        return settings | {
            "enable_bias": draw.random() < 0.7,
            "activation_function": draw.choice(["relu", "gelu", "gelu_new"]),
        }
    shared = draw.choice([each for each in range(1, heads + 1) if heads % each == 0])
    settings |= {
        "rope_parameters": rope,
        "num_key_value_heads": shared,
        "rms_norm_eps": draw.choice([1e-5, 1e-6]),
        "hidden_act": draw.choice(["silu", "silu", "gelu"]),
        "head_dim": draw.choice([width // heads, 6, 16]),
    }
    return settings | _OWN[family](draw, settings)


def _bias(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": draw.random() < 0.3}


def _biases(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    return {**_bias(draw, settings), "mlp_bias": draw.random() < 0.3}


def _chosen_windows(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    first = settings["num_hidden_layers"] // 2
    return draw.choice([{}, {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": first}])


def _listed_windows(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    types = draw.choices(["full_attention", "sliding_attention"], k=settings["num_hidden_layers"])
    return {"sliding_window": draw.choice([4, 7]), "layer_types": draw.choice([None, types])}


def _rotary_by_type(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": draw.choice([10000.0, 99.0])}
    both = {"full_attention": settings["rope_parameters"], "sliding_attention": local}
    return {"rope_parameters": both, **_listed_windows(draw, settings)}


def _gemma(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    del settings["hidden_act"]
    return {
        "hidden_activation": draw.choice(["gelu_pytorch_tanh", "gelu"]),
        "query_pre_attn_scalar": draw.choice([4, 12, 144]),
        "final_logit_softcapping": draw.choice([None, 1.5, 30.0]),
        **_bias(draw, settings),
    }


def _gemma2(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    cap = draw.choice([None, 0.8, 50.0])
    return {**_gemma(draw, settings), **_listed_windows(draw, settings), "attn_logit_softcapping": cap}


def _smollm3(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    rotated = draw.choice([None, draw.choices([0, 1], k=settings["num_hidden_layers"])])
    window = draw.choice([{}, {"use_sliding_window": True, "sliding_window": 5}])
    return {"no_rope_layers": rotated, **window, **_biases(draw, settings)}


def _phi3(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    del settings["head_dim"]  # The class has no other.
    rope, share = settings["rope_parameters"], draw.choice([1.0, 0.5])
    pairs = int(settings["hidden_size"] // settings["num_attention_heads"] * share) // 2
    rope = {"rope_theta": rope["rope_theta"], "partial_rotary_factor": share, "rope_type": "default"}
    # The proof computes 10 tokens, and 24 with a cache, for which transformers must choose the same factors.
    original = draw.choice([8, 24])
    if draw.random() < 0.6:
        factors = ("short_factor", "long_factor")
        rope |= {name: [1.0 + draw.random() * 3 for _ in range(pairs)] for name in factors}
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
    return {
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
        "sliding_window": draw.choice([None, 5]),
    }


def _experts(draw: random.Random, name: str = "num_experts") -> dict[str, Any]:
    number = draw.choice([2, 3, 5, 8])
    return {name: number, "num_experts_per_tok": draw.randint(1, min(4, number))}


def _mixtral(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": draw.choice([None, 5, 8]), **_experts(draw, "num_local_experts")}


def _olmoe(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    del settings["head_dim"]  # The class has no other.
    return {**_bias(draw, settings), **_experts(draw), "norm_topk_prob": draw.random() < 0.5}


def _some_layers(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    layers = settings["num_hidden_layers"]
    return {
        **_experts(draw),
        "norm_topk_prob": draw.random() < 0.5,
        "moe_intermediate_size": draw.choice([8, 13, 24]),
        # At least one layer has experts.
        "decoder_sparse_step": draw.choice([1, min(2, layers)]),
        "mlp_only_layers": draw.choice([None, [], [0] if layers == 3 else []]),
    }


def _qwen2_moe(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        **_some_layers(draw, settings),
        **_chosen_windows(draw, settings),
        "max_window_layers": draw.choice([1, 2]),
        "qkv_bias": draw.random() < 0.7,
        "shared_expert_intermediate_size": draw.choice([6, 20]),
    }


def _qwen3_moe(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    window = draw.choice([{}, {"use_sliding_window": True, "sliding_window": 6}])
    return {**_some_layers(draw, settings), **window, **_bias(draw, settings)}


def _gpt_oss(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    del settings["hidden_act"]  # The class has one.
    rope = settings["rope_parameters"]
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 8}
    number = draw.choice([2, 5, 8])
    return {
        "rope_parameters": draw.choice([rope, {"rope_theta": rope["rope_theta"], **yarn}]),
        "num_local_experts": number,
        "num_experts_per_tok": draw.randint(1, min(4, number)),
        "swiglu_limit": draw.choice([7.0, 0.7]),
        "swiglu_alpha": draw.choice([1.702, 1.0]),
        "attention_bias": draw.random() < 0.7,
        **_listed_windows(draw, settings),
    }


_OWN: dict[str, Callable[[random.Random, dict[str, Any]], dict[str, Any]]] = {
    "llama": _biases,
    "mistral": lambda draw, settings: {"sliding_window": draw.choice([None, 5, 8])},
    "qwen2": _chosen_windows,
    "qwen3": lambda draw, settings: _bias(draw, settings) | _chosen_windows(draw, settings),
    "olmo2": _bias,
    "olmo3": lambda draw, settings: _bias(draw, settings) | _rotary_by_type(draw, settings),
    "gemma2": _gemma2,
    "gemma3_text": lambda draw, settings: _gemma(draw, settings) | _rotary_by_type(draw, settings),
    "smollm3": _smollm3,
    "phi3": _phi3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
}
"""What a class has in addition to Llama's options."""


def write_model(
    folder: Path, family: str, settings: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a model whose weights, biases and norms are all random, with its tokenizer; return the folder."""
    import transformers  # Takes seconds.

    kind = getattr(transformers, CLASSES[family])
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = kind(kind.config_class(**settings, **ids, initializer_range=0.2))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder, family)
    return folder

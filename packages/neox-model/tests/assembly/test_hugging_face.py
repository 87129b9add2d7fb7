"""Logits and gradients against models of Hugging Face's transformers, random weights, float32."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from neox_model.assembly.model import build_model
from neox_model.layers.positions import RotaryPosition
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.parallel.logical import named_logical_parameters
from support.settings import resolved_from, specs_from

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH, LAYERS, WIDTH, HEADS = 50, 12, 3, 48, 6
HEAD_WIDTH = WIDTH // HEADS
# Their weights, by our name: what ours is made of. Being linear, it turns gradients the same way.
Joined = Callable[[str, Callable[[str], Tensor]], Tensor]


def compare(settings: dict[str, Any], theirs: nn.Module, joined: Joined) -> None:
    """Give our model their weights, and compare what both make of the same tokens."""
    ours = build_model(
        *specs_from({"num_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS, **settings}),
        SINGLE_PROCESS,
        vocab_size=VOCAB,
    )
    weights = dict(theirs.named_parameters())
    generator = torch.Generator().manual_seed(4)
    used: set[str] = set()
    with torch.no_grad():
        for parameter in weights.values():  # biases and norms too
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in named_logical_parameters(ours):
            parameter.copy_(joined(name, lambda their: used.add(their) or weights[their]))
    assert used == set(weights)
    tokens = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=generator)
    logits = ours(tokens[:, :-1])
    expected = theirs(tokens[:, :-1]).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    ours.loss_fn(logits, (tokens[:, 1:], torch.full((2, LENGTH), 0.5 / LENGTH))).backward()
    nn.functional.cross_entropy(expected.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, parameter in named_logical_parameters(ours):
        gradient = joined(name, lambda their: weights[their].grad)
        torch.testing.assert_close(
            parameter.grad, gradient, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def in_layer(name: str) -> tuple[str, str, str]:
    """Index, part and kind of "layers.INDEX.PART.KIND"."""
    _, index, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    return index, part, kind


def gpt_neox(name: str, get: Callable[[str], Tensor]) -> Tensor:
    parts = {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attention.qkv": "attention.query_key_value",
        "attention.dense": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }
    if name.startswith("layers."):
        index, part, kind = in_layer(name)
        return get(f"gpt_neox.layers.{index}.{parts[part]}.{kind}")
    name = name.replace("embedding.word_embeddings", "gpt_neox.embed_in")
    return get(name.replace("final_norm", "gpt_neox.final_layer_norm"))


@pytest.mark.parametrize(
    ("rotary_pct", "parallel", "tied"), list(product([0.25, 1.0], [False, True], [False, True]))
)
@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_gpt_neox_of_transformers_is_the_same_function(rotary_pct, parallel, tied, activation):
    theirs = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=100,
            hidden_act=activation,
            rotary_pct=rotary_pct,
            rotary_emb_base=1000,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1000,
                "partial_rotary_factor": rotary_pct,
            },
            max_position_embeddings=LENGTH,
            layer_norm_eps=1e-4,
            use_parallel_residual=parallel,
            tie_word_embeddings=tied,
            initializer_range=0.2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
    )
    settings = {
        "mlp_width": 100,
        "openai_gelu": activation == "gelu_new",
        "pos_emb": "rotary",
        "rotary_pct": rotary_pct,
        "rotary_emb_base": 1000,
        "layernorm_epsilon": 1e-4,
        "gpt_j_residual": parallel,
        "no_weight_tying": not tied,
    }
    compare(settings, theirs, gpt_neox)


def by_head(parts: list[Tensor], groups: int) -> Tensor:
    """Separate query, key and value rows, ordered head by head (group by group)."""
    split = [part.view(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(split, dim=1).flatten(0, 1)


def gpt2(name: str, get: Callable[[str], Tensor]) -> Tensor:
    """GPT-2 keeps matrices the other way round, and all queries before all keys."""
    parts = {
        "norm1": "ln_1",
        "norm2": "ln_2",
        "attention.qkv": "attn.c_attn",
        "attention.dense": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    if not name.startswith("layers."):
        names = {"embedding.word_embeddings": "wte", "embedding.position_embeddings": "wpe"}
        part, kind = name.rsplit(".", 1)
        return get(f"transformer.{names.get(part, 'ln_f')}.{kind}")
    index, part, kind = in_layer(name)
    found = get(f"transformer.h.{index}.{parts[part]}.{kind}")
    found = found.t() if found.dim() == 2 else found
    return by_head(list(found.chunk(3)), HEADS) if part == "attention.qkv" else found


def test_gpt2_of_transformers_is_the_same_function():
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=LENGTH,
            activation_function="gelu_new",
            initializer_range=0.2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    compare({"openai_gelu": True, "pos_emb": "learned"}, theirs, gpt2)


def llama(name: str, get: Callable[[str], Tensor]) -> Tensor:
    parts = {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attention.dense": "self_attn.o_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.down": "mlp.down_proj",
    }
    if not name.startswith("layers."):
        names = {"embedding.word_embeddings": "model.embed_tokens", "final_norm": "model.norm"}
        part, kind = name.rsplit(".", 1)
        return get(f"{names.get(part, part)}.{kind}")
    index, part, kind = in_layer(name)
    if part == "attention.qkv":
        rows = [get(f"model.layers.{index}.self_attn.{which}_proj.{kind}") for which in "qkv"]
        return by_head(rows, HEADS * len(rows[1]) // len(rows[0]))
    return get(f"model.layers.{index}.{parts[part]}.{kind}")


@pytest.mark.parametrize(("shared_keys", "head_dim"), [(6, None), (2, 10), (1, None)])
@pytest.mark.parametrize("model", ["Llama", "Mistral"])
def test_llama_and_mistral_of_transformers_are_the_same_function(model, shared_keys, head_dim):
    config = getattr(transformers, f"{model}Config")(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=shared_keys,
        head_dim=head_dim,
        intermediate_size=100,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        initializer_range=0.2,
        tie_word_embeddings=False,
        attention_dropout=0.0,
    )
    settings = {
        "mlp_width": 100,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "rms_norm_epsilon": 1e-4,
        "pos_emb": "rotary",
        "rotary_emb_base": 1000,
        "num_kv_heads": shared_keys,
        "head_dim": head_dim,
        "no_weight_tying": True,
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
    }
    compare(settings, getattr(transformers, f"{model}ForCausalLM")(config), llama)


def qwen3(name: str, get: Callable[[str], Tensor]) -> Tensor:
    for which in ("query", "key"):
        if f"qk_norm.{which}" in name:
            index, _, kind = in_layer(name)
            return get(f"model.layers.{index}.self_attn.{which[0]}_norm.{kind}")
    return llama(name, get)


def olmo2(name: str, get: Callable[[str], Tensor]) -> Tensor:
    after = {"norm1_after": "post_attention_layernorm", "norm2_after": "post_feedforward_layernorm"}
    if name.startswith("layers.") and in_layer(name)[1] in after:
        index, part, kind = in_layer(name)
        return get(f"model.layers.{index}.{after[part]}.{kind}")
    return qwen3(name, get)


@pytest.mark.parametrize("shared_keys", [6, 2])
@pytest.mark.parametrize(
    ("model", "settings", "joined"),
    [
        ("Qwen3", {"qk_norm": "head"}, qwen3),
        ("Olmo2", {"qk_norm": "width", "norm_placement": "after"}, olmo2),
    ],
)
def test_norms_of_transformers_are_the_same_function(model, settings, joined, shared_keys):
    config = getattr(transformers, f"{model}Config")(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=shared_keys,
        head_dim=HEAD_WIDTH,
        intermediate_size=100,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        initializer_range=0.2,
        tie_word_embeddings=False,
        attention_dropout=0.0,
    )
    common = {
        "mlp_width": 100,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "rms_norm_epsilon": 1e-4,
        "pos_emb": "rotary",
        "rotary_emb_base": 1000,
        "num_kv_heads": shared_keys,
        "no_weight_tying": True,
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
    }
    compare(common | settings, getattr(transformers, f"{model}ForCausalLM")(config), joined)


SCALINGS = [
    {},
    {"type": "linear", "factor": 4.0},
    {
        "type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
        "attention_factor": 1.3,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("base", [10000, 500])
def test_rotary_tables_are_those_of_transformers_to_the_last_bit(base, scaling):
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    theirs = {"rope_type": "default", **scaling, "rope_theta": float(base)}
    theirs["rope_type"] = theirs.pop("type", "default")
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=256, rope_parameters=theirs
    )
    settings = resolved_from(
        {
            "pos_emb": "rotary",
            "rotary_emb_base": base,
            "rotary_scaling": scaling or {"type": "none"},
            "max_position_embeddings": 256,
        }
    )
    in_use = settings.config.attention.rotary_scaling.in_use(256)
    position = RotaryPosition(head_width=32, base=base, scaling=in_use)
    cosines, sines = position.tables(256, torch.device("cpu"), torch.float32)
    expected = rotary(config)(torch.zeros(1, 256, 1), torch.arange(256).unsqueeze(0))
    assert torch.equal(cosines, expected[0][0, :, :16])
    assert torch.equal(sines, expected[1][0, :, :16])
    if scaling:  # The formula has an effect.
        plain = RotaryPosition(head_width=32, base=base)
        assert not torch.equal(cosines, plain.tables(256, cosines.device, cosines.dtype)[0])


def test_qwen2_of_transformers_is_the_same_function():
    config = transformers.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=100,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    settings = {
        "mlp_width": 100,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "rms_norm_epsilon": 1e-4,
        "pos_emb": "rotary",
        "rotary_emb_base": 1000,
        "num_kv_heads": 2,
        "no_weight_tying": True,
        "use_bias_in_attn_linear": False,
        "use_bias_in_qkv": True,
        "use_bias_in_mlp": False,
    }
    compare(settings, transformers.Qwen2ForCausalLM(config), llama)

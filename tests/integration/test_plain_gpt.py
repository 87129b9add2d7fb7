"""benchmarks/plain_gpt.py: the peers of benchmarks compute what transformers computes."""

import importlib

import pytest
import torch

from support.sources import ROOT

SIZES = {"layers": 2, "hidden": 32, "heads": 4, "length": 12, "vocabulary": 40}


@pytest.fixture
def plain_gpt(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("plain_gpt")


def assert_equal_logits(model, reference):
    tokens = torch.randint(
        0, SIZES["vocabulary"], (3, SIZES["length"]), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        expected = reference(tokens).logits
        # Values of random weights, of which no part vanishes.
        assert expected.std() > 0.1
        torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)


def randomize(model):
    """Draw weights, so that no bias and no norm is that of a new model."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def test_the_llama_is_that_of_transformers(plain_gpt):
    transformers = pytest.importorskip("transformers")
    model = plain_gpt.PlainLlama(**SIZES, key_heads=2, width=48).double()
    randomize(model)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=12,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    reference = transformers.LlamaForCausalLM(config).double().eval()
    weights = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.weight}
    for number, layer in enumerate(model.layers):
        query, key, value = layer.qkv.weight.split((32, 16, 16))
        weights |= {
            f"model.layers.{number}.{name}.weight": weight
            for name, weight in {
                "input_layernorm": layer.norm1.weight,
                "post_attention_layernorm": layer.norm2.weight,
                "self_attn.q_proj": query,
                "self_attn.k_proj": key,
                "self_attn.v_proj": value,
                "self_attn.o_proj": layer.dense.weight,
                "mlp.gate_proj": layer.gate.weight,
                "mlp.up_proj": layer.up.weight,
                "mlp.down_proj": layer.down.weight,
            }.items()
        }
    reference.load_state_dict(weights | {"lm_head.weight": model.head.weight})
    assert_equal_logits(model, reference)


def test_the_gpt_is_the_gpt_neox_of_transformers(plain_gpt):
    transformers = pytest.importorskip("transformers")
    model = plain_gpt.PlainGPT(**SIZES).double()
    randomize(model)
    config = transformers.GPTNeoXConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=12,
        use_parallel_residual=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
    )
    reference = transformers.GPTNeoXForCausalLM(config).double().eval()
    weights = {"lm_head.weight": model.head.weight, "gpt_neox.embed_in.weight": model.embedding.weight}
    parts = {"gpt_neox.final_layer_norm": model.norm}
    for number, layer in enumerate(model.layers):
        parts |= {
            f"gpt_neox.layers.{number}.{name}": part
            for name, part in {
                "input_layernorm": layer.norm1,
                "post_attention_layernorm": layer.norm2,
                "attention.dense": layer.dense,
                "mlp.dense_h_to_4h": layer.up,
                "mlp.dense_4h_to_h": layer.down,
            }.items()
        }
        for kind in ("weight", "bias"):
            # Queries, keys and values of all heads; there, those of each head.
            projection = getattr(layer.qkv, kind).unflatten(0, (3, 4, 8)).transpose(0, 1).flatten(0, 2)
            weights[f"gpt_neox.layers.{number}.attention.query_key_value.{kind}"] = projection
    for name, part in parts.items():
        weights |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
    reference.load_state_dict(weights)
    assert_equal_logits(model, reference)

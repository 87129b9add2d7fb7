"""Logits and gradients against Hugging Face's GPTNeoXForCausalLM, random weights, float32."""

import pytest
import torch

from neox_model.build.model import build_model
from neox_model.parallel.groups import SINGLE, Groups
from neox_model.parallel.logical import named_logical_parameters
from support.settings import resolved_from

transformers = pytest.importorskip("transformers")

ALONE = Groups(SINGLE, SINGLE, SINGLE, SINGLE, SINGLE)
VOCAB, LENGTH, LAYERS = 50, 12, 3
PARTS = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.dense": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def their_name(name: str) -> str:
    if name.startswith("layers."):
        _, index, rest = name.split(".", 2)
        part, kind = rest.rsplit(".", 1)
        return f"gpt_neox.layers.{index}.{PARTS[part]}.{kind}"
    return (
        name.replace("embedding.word_embeddings", "gpt_neox.embed_in")
        .replace("final_norm", "gpt_neox.final_layer_norm")
        .replace("lm_head", "embed_out")
    )


def their_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    # transformers 5 calls the output projection lm_head in memory.
    return {name.replace("lm_head.", "embed_out."): value for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("rotary_pct", "parallel", "tied", "activation"),
    [(0.25, True, False, "gelu"), (1.0, False, True, "gelu"), (0.5, True, True, "gelu_new")],
)
def test_gpt_neox_of_transformers_is_the_same_function(rotary_pct, parallel, tied, activation):
    theirs = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=6,
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
            initializer_range=0.3,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
    ).train()
    settings = {
        "hidden_size": 48,
        "intermediate_size": 100,
        "openai_gelu": activation == "gelu_new",
        "pos_emb": "rotary",
        "rotary_pct": rotary_pct,
        "rotary_emb_base": 1000,
        "layernorm_epsilon": 1e-4,
        "gpt_j_residual": parallel,
        "no_weight_tying": not tied,
    }
    ours = build_model(resolved_from(settings), ALONE, vocab_size=VOCAB)
    weights = their_parameters(theirs)
    names = {name: their_name(name) for name, _ in named_logical_parameters(ours)}
    assert set(names.values()) == set(weights)
    with torch.no_grad():
        for name, parameter in named_logical_parameters(ours):
            weights[names[name]].add_(0.1 * torch.randn_like(parameter))  # biases and norms too
            parameter.copy_(weights[names[name]])
    tokens = torch.randint(0, VOCAB, (2, LENGTH + 1))
    logits = ours(tokens[:, :-1])
    expected = theirs(tokens[:, :-1]).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    ours.loss_fn(logits, (tokens[:, 1:], torch.ones(2, LENGTH))).backward()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, parameter in named_logical_parameters(ours):
        torch.testing.assert_close(
            parameter.grad, weights[names[name]].grad, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )

"""From configuration to a list of layers, and to a plain model on one rank."""

import re
import tracemalloc

import pytest
import torch
from torch import nn

from neox_model.assembly.activation_checkpointing import build_recomputation
from neox_model.assembly.as_sequential import SequentialModel
from neox_model.assembly.model import build_plan
from neox_model.errors import LayoutError
from neox_model.initialization import initialize_parameters
from neox_model.layers.attention import DenseCore, SoftmaxCore
from neox_model.layers.lm_head import LMLoss
from neox_model.layers.mlp import GatedMLP
from neox_model.layers.norms import LayerNorm, RMSNorm, ScaleNorm
from neox_model.layers.positions import LearnedPosition, RotaryPosition, SinusoidalPosition
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK, Group, Groups
from neox_model.parallel.logical import named_logical_parameters
from support.refusals import refused
from support.settings import resolved_from, specs_from


def plan_of(**settings):
    return build_plan(*specs_from(settings), SINGLE_PROCESS, vocab_size=11)


def model_of(**settings) -> nn.Module:
    resolved = resolved_from(settings)
    model = SequentialModel(
        build_plan(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=11),
        loss_fn=LMLoss(resolved.model.embedding.entries(11)),
        recomputation=build_recomputation(resolved.run.recomputation, SINGLE_RANK, passes=1),
    )
    initialize_parameters(model, seed=3)
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (2, 13), generator=generator)
    return model.loss_fn(model(tokens[:, :-1]), (tokens[:, 1:], torch.full((2, 12), 1 / 24)))


def test_the_plan_is_the_model_in_order():
    plan = plan_of()
    assert [layer.name for layer in plan] == [
        "embedding",
        "layers.0",
        "layers.1",
        "layers.2",
        "final_norm",
        "lm_head",
    ]


def test_the_default_partition_regex_matches_the_transformer_layers_alone():
    matches = [
        layer.name for layer in plan_of() if re.search("transformer|mlp", layer.cls.__name__, re.IGNORECASE)
    ]
    assert matches == ["layers.0", "layers.1", "layers.2"]


def test_planning_175_billion_parameters_builds_nothing():
    sizes = {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96}
    resolved = resolved_from(sizes)
    tracemalloc.start()
    build_plan(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=50257)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


@pytest.mark.parametrize(
    ("entries", "multiple", "padded"), [(50257, 128, 50304), (50304, 128, 50304), (11, 1, 11)]
)
def test_vocabulary_padding_is_the_same_on_every_layout(entries, multiple, padded):
    for size in (1, 2):
        resolved = resolved_from(
            {"make_vocab_size_divisible_by": multiple, "model_parallel_size": size}, devices=size
        )
        assert resolved.model.embedding.entries(entries) == padded


LAYER_PARAMETERS = [
    "norm1.weight",
    "norm1.bias",
    "attention.qkv.weight",
    "attention.qkv.bias",
    "attention.dense.weight",
    "attention.dense.bias",
    "norm2.weight",
    "norm2.bias",
    "mlp.up.weight",
    "mlp.up.bias",
    "mlp.down.weight",
    "mlp.down.bias",
]


def test_parameters_have_their_logical_names_and_shapes():
    shapes = {
        name: tuple(parameter.shape) for name, parameter in named_logical_parameters(model_of(num_layers=1))
    }
    assert list(shapes) == [
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        *(f"layers.0.{name}" for name in LAYER_PARAMETERS),
        "final_norm.weight",
        "final_norm.bias",
    ]
    assert shapes["embedding.word_embeddings.weight"] == (11, 24)
    assert shapes["embedding.position_embeddings.weight"] == (12, 24)
    assert shapes["layers.0.attention.qkv.weight"] == (72, 24)
    assert shapes["layers.0.mlp.up.weight"] == (96, 24)
    assert shapes["layers.0.mlp.down.weight"] == (24, 96)


def test_an_untied_head_has_its_own_weight():
    tied, untied = model_of(), model_of(no_weight_tying=True)
    names = [name for name, _ in named_logical_parameters(untied)]
    assert names[-1] == "lm_head.weight"
    assert len(names) == len(list(named_logical_parameters(tied))) + 1
    assert tied.stack[-1].weight is tied.stack[0].word_embeddings.weight
    assert not torch.equal(untied.stack[-1].weight, untied.stack[0].word_embeddings.weight)


def test_a_tied_weight_gets_both_gradients():
    tied, untied = model_of(), model_of(no_weight_tying=True)
    untied.stack[-1].weight.data.copy_(untied.stack[0].word_embeddings.weight)
    for model in (tied, untied):
        loss_of(model).backward()
    both = untied.stack[0].word_embeddings.weight.grad + untied.stack[-1].weight.grad
    torch.testing.assert_close(tied.stack[0].word_embeddings.weight.grad, both)


@pytest.mark.parametrize(
    ("settings", "check"),
    [
        ({}, lambda m: isinstance(m.stack[0].position_embeddings, LearnedPosition)),
        ({"pos_emb": "sinusoidal"}, lambda m: isinstance(m.stack[0].position_embeddings, SinusoidalPosition)),
        ({"pos_emb": "none"}, lambda m: m.stack[0].position_embeddings is None),
        ({"pos_emb": "none"}, lambda m: m.stack[1].attention.position is None),
        ({"pos_emb": "rotary"}, lambda m: m.stack[0].position_embeddings is None),
        (
            {"pos_emb": "rotary", "rotary_pct": 0.5, "rotary_emb_base": 500},
            lambda m: (m.stack[1].attention.position.width, m.stack[1].attention.position.base) == (2, 500),
        ),
        ({"pos_emb": "rotary"}, lambda m: isinstance(m.stack[3].attention.position, RotaryPosition)),
        ({"layernorm_epsilon": 0.25}, lambda m: m.stack[1].norm1.epsilon == m.stack[4].epsilon == 0.25),
        ({"norm": "apexlayernorm"}, lambda m: isinstance(m.stack[1].norm1, LayerNorm)),
        ({"norm": "rmsnorm", "rms_norm_epsilon": 0.5}, lambda m: m.stack[1].norm2.epsilon == 0.5),
        ({"norm": "rmsnorm"}, lambda m: isinstance(m.stack[4], RMSNorm)),
        ({"norm": "scalenorm", "scalenorm_epsilon": 0.5}, lambda m: m.stack[4].epsilon == 0.5),
        ({"norm": "scalenorm"}, lambda m: isinstance(m.stack[1].norm1, ScaleNorm)),
        ({"activation": "geglu"}, lambda m: isinstance(m.stack[1].mlp, GatedMLP)),
        ({"activation": "geglu"}, lambda m: m.stack[1].mlp.gate.weight.shape == (64, 24)),
        (
            {"activation": "swiglu", "mlp_width": 40},
            lambda m: m.stack[1].mlp.up.weight.shape == (40, 24),
        ),
        (
            {"activation": "swiglu", "intermediate_size": 60, "mlp_multiple_of": 8},
            lambda m: m.stack[1].mlp.up.weight.shape == m.stack[1].mlp.gate.weight.shape == (24, 24),
        ),
        ({"expansion_factor": 1.5}, lambda m: m.stack[1].mlp.up.weight.shape == (36, 24)),
        ({"use_bias_in_norms": False}, lambda m: m.stack[1].norm1.bias is m.stack[4].bias is None),
        ({"mlp_width": 40}, lambda m: m.stack[1].mlp.up.weight.shape == (40, 24)),
        ({"activation": "mish"}, lambda m: m.stack[1].mlp.activation is nn.functional.mish),
        (
            {"openai_gelu": True},
            lambda m: torch.equal(
                m.stack[1].mlp.activation(torch.ones(1)),
                nn.functional.gelu(torch.ones(1), approximate="tanh"),
            ),
        ),
        ({"gpt_j_residual": True}, lambda m: m.stack[1].parallel_residual),
        ({"gpt_j_residual": True, "gpt_j_tied": True}, lambda m: m.stack[1].norm2 is None),
        ({"gpt_j_tied": True}, lambda m: m.stack[1].norm2 is not None),
        ({"norm_placement": "after"}, lambda m: m.stack[1].norm1 is None and m.stack[4].weight is not None),
        ({"norm_zero_centered": True}, lambda m: not m.stack[1].norm1.weight.any()),
        ({"apply_residual_connection_post_layernorm": True}, lambda m: m.stack[1].residual_after_norm),
        ({"hidden_dropout": 0.3}, lambda m: m.stack[0].dropout == m.stack[2].dropout == 0.3),
        ({"attention_dropout": 0.3}, lambda m: m.stack[1].attention.core.dropout == 0.3),
        ({}, lambda m: isinstance(m.stack[1].attention.core, DenseCore)),
        (
            {"apply_query_key_layer_scaling": True},
            lambda m: isinstance(m.stack[1].attention.core, SoftmaxCore),
        ),
        (
            {"apply_query_key_layer_scaling": True},
            lambda m: [layer.attention.core.coefficient for layer in m.stack[1:4]] == [1, 1, 2],
        ),
        (
            {"init_method": "orthogonal"},
            lambda m: m.stack[1].attention.qkv.weight.T @ m.stack[1].attention.qkv.weight,
        ),
    ],
)
def test_each_setting_reaches_its_layer(settings, check):
    result = check(model_of(**settings))
    if isinstance(result, torch.Tensor):
        torch.testing.assert_close(result, 2 * torch.eye(len(result)), atol=1e-4, rtol=1e-4)
    else:
        assert result


def test_init_methods_go_to_their_matrices():
    model = model_of(hidden_size=96, init_method="normal", output_layer_init_method="scaled_normal")
    stds = {name: parameter.std().item() for name, parameter in named_logical_parameters(model)}
    for name in (
        "embedding.word_embeddings",
        "embedding.position_embeddings",
        "layers.1.attention.qkv",
        "layers.1.mlp.up",
    ):
        assert stds[f"{name}.weight"] == pytest.approx(0.3, rel=0.1)
    for name in ("layers.1.attention.dense", "layers.1.mlp.down"):
        assert stds[f"{name}.weight"] == pytest.approx(0.3 / 6**0.5, rel=0.1)


def test_layer_scaling_changes_no_result():
    plain, scaled = model_of(num_layers=4), model_of(num_layers=4, apply_query_key_layer_scaling=True)
    torch.testing.assert_close(loss_of(plain), loss_of(scaled))


@pytest.mark.parametrize("segment", [1, 2, 5])
def test_recomputed_activations_change_no_gradient(segment):
    plain = model_of()
    other = model_of(checkpoint_activations=True, checkpoint_num_layers=segment)
    calls = []
    other.stack[2].register_forward_pre_hook(lambda *_: calls.append(1))
    losses = [loss_of(plain), loss_of(other)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    assert len(calls) == 2
    for (name, mine), (_, theirs) in zip(
        named_logical_parameters(plain), named_logical_parameters(other), strict=True
    ):
        assert torch.equal(mine.grad, theirs.grad), name


def test_recomputation_repeats_dropout():
    gradients = []
    for checkpoint in (False, True):
        model = model_of(hidden_dropout=0.2, attention_dropout=0.2, checkpoint_activations=checkpoint)
        torch.manual_seed(5)
        loss_of(model).backward()
        gradients.append(model.stack[0].word_embeddings.weight.grad)
    assert torch.equal(*gradients)


def test_nothing_is_recomputed_without_gradients():
    model = model_of(checkpoint_activations=True).eval()
    calls = []
    model.stack[2].register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        loss_of(model)
    assert len(calls) == 1


def test_a_gated_width_that_does_not_split_is_refused():
    two = Group(0, 2, None, (0, 1))
    groups = Groups(SINGLE_RANK, two, SINGLE_RANK, two, two)
    resolved = resolved_from({"activation": "geglu", "mlp_width": 41})
    with refused(LayoutError, "41", "over 2", "2"):
        build_plan(resolved.model, resolved.run, groups, vocab_size=11)

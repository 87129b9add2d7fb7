"""Fused operators: required, auto, or disabled.

Fused implementations require a GPU; these tests replace them with CPU versions.
"""

import dataclasses
import logging

import pytest
import torch
from torch import distributed

import neox_kernels
from neox_kernels import Availability, KernelUnavailable, choice
from neox_model.assembly import operators
from neox_model.assembly.as_sequential import SequentialModel
from neox_model.assembly.model import build_model, build_plan
from neox_model.assembly.operators import choose_operators
from neox_model.initialization import initialize_parameters
from neox_model.layers import norms
from neox_model.layers.attention import DenseCore, SoftmaxCore
from neox_model.layers.experts import (
    ExpertBlocks,
    looped_product,
    uncompiled_grouped_product,
)
from neox_model.layers.lm_head import LMLoss
from neox_model.layers.residual_layer import add_dropped
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK, Group, Groups
from neox_model.parallel.topology import create_groups
from support.distributed import run_ranks
from support.refusals import refused, shows
from support.settings import resolved_from, specs_from

NAMES = (
    "scaled_causal_softmax",
    "scaled_masked_softmax",
    "rotary",
    "split_rotary",
    "bias_gelu",
    "bias_swiglu",
    "bias_geglu",
    "bias_geglu_tanh",
    "bias_dropout_add",
    "layer_norm",
    "add_layer_norm",
    "rms_norm",
    "add_rms_norm",
    "cross_entropy",
    "apex_layer_norm",
)
CAUSAL, MASKED = "scaled_upper_triang_masked_softmax_fusion", "scaled_masked_softmax_fusion"
ROTARY = {"pos_emb": "rotary", "rotary_pct": 0.5}
RMS_NORM = {"norm": "rmsnorm", "rms_norm_epsilon": 0.1}
LLAMA = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "pos_emb": "rotary",
    "num_kv_heads": 2,
    "no_weight_tying": True,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
}
LLAMA_FUSIONS = ("rmsnorm_fusion", "glu_fusion", "rope_fusion")

# The setting, the operators that it brings in, and the same model without it.
FUSIONS = [
    ({CAUSAL: True}, "scaled_causal_softmax", {}),
    ({MASKED: True}, "scaled_masked_softmax", {}),
    ({CAUSAL: True, MASKED: "auto"}, "scaled_causal_softmax", {}),
    ({MASKED: True, CAUSAL: "auto"}, "scaled_masked_softmax", {}),
    ({"bias_gelu_fusion": True}, "bias_gelu", {"openai_gelu": True}),
    ({"bias_dropout_fusion": True}, "bias_dropout_add", {}),
    ({"rope_fusion": True, **ROTARY}, "split_rotary", ROTARY),
    (
        {"layernorm_fusion": True, "layernorm_epsilon": 0.1},
        "layer_norm layer_norm.with_input add_layer_norm",
        {"layernorm_epsilon": 0.1},
    ),
    ({"norm": "apexlayernorm", "layernorm_epsilon": 0.1}, "apex_layer_norm", {"layernorm_epsilon": 0.1}),
    ({"rmsnorm_fusion": True, **RMS_NORM}, "rms_norm rms_norm.with_input add_rms_norm", RMS_NORM),
    ({"glu_fusion": True, "activation": "swiglu"}, "bias_swiglu", {"activation": "swiglu"}),
    ({"glu_fusion": True, "activation": "geglu"}, "bias_geglu", {"activation": "geglu"}),
    ({"glu_fusion": True, "activation": "geglu_tanh"}, "bias_geglu_tanh", {"activation": "geglu_tanh"}),
]


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Every operator as if this machine could use it; gives the arguments of all calls by name."""
    monkeypatch.setenv("NEOX_KERNELS_CACHE", str(tmp_path / "cache"))
    choice._verdict.cache_clear()
    found = {}

    def counted(name, form):
        def call(*args, **kwargs):
            found.setdefault(name, []).append((args, kwargs))
            return form(*args, **kwargs)

        return call

    for name in NAMES:
        operator = getattr(neox_kernels, name)
        # apex has no CPU kernel: use ours, which has the same signature.
        fused = neox_kernels.layer_norm.fused if name == "apex_layer_norm" else operator.fused
        ready = dataclasses.replace(
            operator,
            fused=counted(name, fused),
            with_input=operator.with_input and counted(f"{name}.with_input", operator.with_input),
            availability=lambda device, dtype, *, may_build: Availability(True, "for this test"),
        )
        monkeypatch.setattr(operators, name, ready)
    return found


def model_of(settings):
    resolved = resolved_from(settings)
    loss = LMLoss(resolved.model.embedding.entries(11))
    model = SequentialModel(
        build_plan(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=11), loss_fn=loss
    )
    initialize_parameters(model, seed=3)
    return model


def loss_and_gradients(model, documents=None):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (2, 13), generator=generator)
    inputs = tokens[:, :-1] if documents is None else (tokens[:, :-1], documents, None)
    loss = model.loss_fn(model(inputs), (tokens[:, 1:], torch.full((2, 12), 1 / 24)))
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(("settings", "names", "without"), FUSIONS)
def test_a_fused_operator_is_called_and_changes_no_result(calls, settings, names, without):
    loss, gradients = loss_and_gradients(model_of(settings))
    assert set(calls) == set(names.split())
    expected_loss, expected = loss_and_gradients(model_of(without))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for given, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(given, wanted, atol=2e-6, rtol=1e-4)


def test_the_operator_of_the_mlp_is_chosen_without_attention(calls):
    resolved = resolved_from({"glu_fusion": True, "activation": "swiglu"})
    # Of no class that the choice knows.
    layers = tuple(dataclasses.replace(layer, mixer=object()) for layer in resolved.model.layers)
    spec = dataclasses.replace(resolved.model, layers=layers)
    device = torch.device("cpu")
    found = choose_operators(spec, resolved.run, SINGLE_PROCESS, device=device, dtype=torch.float32)
    assert found.gated_activation is operators.bias_swiglu.fused
    assert (found.softmax, found.rotary, found.flex_unusable) == (None, None, None)


def shapes(args):
    return [tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args]


@pytest.mark.parametrize(
    ("settings", "name", "times", "arguments"),
    [
        ({CAUSAL: True}, "scaled_causal_softmax", 3, [(2, 6, 12, 12), 1]),
        ({MASKED: True}, "scaled_masked_softmax", 3, [(2, 6, 12, 12), (1, 1, 12, 12), 1]),
        ({"bias_gelu_fusion": True}, "bias_gelu", 3, [(12, 2, 96), (96,)]),
        ({"bias_dropout_fusion": True, "hidden_dropout": 0.25}, "bias_dropout_add", 6,
            [(12, 2, 24), (24,), (12, 2, 24), 0.25, True]),
        ({"rope_fusion": True, **ROTARY}, "split_rotary", 3, [(12, 2, 72), (12, 1), (12, 1), 6, 4]),
        ({"layernorm_fusion": True, "layernorm_epsilon": 0.1}, "layer_norm", 1,
            [(12, 2, 24), (24,), (24,), 0.1]),
        ({"layernorm_fusion": True, "layernorm_epsilon": 0.1}, "layer_norm.with_input", 3,
            [(12, 2, 24), (24,), (24,), 0.1]),
        ({"layernorm_fusion": True, "bias_dropout_fusion": True}, "add_layer_norm", 3,
            [(12, 2, 24), (12, 2, 24), (24,), (24,), 1e-5]),
        ({"layernorm_fusion": True, "bias_dropout_fusion": True}, "bias_dropout_add", 3,
            [(12, 2, 24), (24,), (12, 2, 24), 0.0, True]),
        ({"norm": "apexlayernorm"}, "apex_layer_norm", 7, [(12, 2, 24), (24,), (24,), 1e-5]),
        ({"rmsnorm_fusion": True, **RMS_NORM}, "rms_norm", 1, [(12, 2, 24), (24,), 0.1]),
        ({"rmsnorm_fusion": True, **RMS_NORM}, "rms_norm.with_input", 3, [(12, 2, 24), (24,), 0.1]),
        ({"rmsnorm_fusion": True, **RMS_NORM}, "add_rms_norm", 3, [(12, 2, 24), (12, 2, 24), (24,), 0.1]),
        ({"glu_fusion": True, "activation": "swiglu", "mlp_width": 50}, "bias_swiglu", 3,
            [(12, 2, 50), (12, 2, 50), (50,), (50,)]),
        ({"glu_fusion": True, "activation": "geglu", "use_bias_in_mlp": False}, "bias_geglu", 3,
            [(12, 2, 64), (12, 2, 64), None, None]),
    ],
)  # fmt: skip
def test_a_fused_operator_gets_its_arguments(calls, settings, name, times, arguments):
    loss_and_gradients(model_of(settings))
    assert len(calls[name]) == times
    args, kwargs = calls[name][0]
    assert (shapes(args), kwargs) == (arguments, {})


def test_the_rotation_of_a_16_bit_model_keeps_float32_angles(calls):
    position = model_of({"rope_fusion": True, **ROTARY}).stack[1].attention.position
    query = torch.randn(3, 1, 2, 4, dtype=torch.bfloat16)
    whole = position(torch.cat((query, query)), torch.cat((query, query)))[0]
    torch.testing.assert_close(position(query, query, start=3)[0], whole[3:], atol=0, rtol=0)
    args, _ = calls["rotary"][-1]
    assert [arg.dtype for arg in args] == [torch.bfloat16] * 2 + [torch.float32] * 2


def test_the_causal_softmax_leaves_borders_of_documents_to_the_masked_one(calls):
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    loss, _ = loss_and_gradients(model_of({CAUSAL: True}), documents)
    assert set(calls) == {"scaled_masked_softmax"}
    assert loss == pytest.approx(loss_and_gradients(model_of({}), documents)[0], rel=1e-5)


def test_a_fused_dropout_drops_in_training_alone(calls):
    model = model_of({"bias_dropout_fusion": True, "hidden_dropout": 0.5})
    plain = model_of({"hidden_dropout": 0.5})
    assert loss_and_gradients(model)[0] != loss_and_gradients(model)[0]
    assert loss_and_gradients(model.eval())[0] == pytest.approx(loss_and_gradients(plain.eval())[0], rel=1e-5)
    assert calls["bias_dropout_add"][-1][0][3:] == (0.5, False)


@pytest.mark.parametrize(
    "between",
    [
        {"hidden_dropout": 0.1},
        {"gpt_j_residual": True},
        {"apply_residual_connection_post_layernorm": True},
        {"norm": "apexlayernorm", "layernorm_fusion": "auto"},
        {"norm_placement": "after", "bias_dropout_fusion": True},
    ],
    ids=str,
)
def test_a_norm_adds_only_what_comes_directly_before_it(calls, between):
    loss, gradients = loss_and_gradients(model_of({"layernorm_fusion": True, **between}).eval())
    assert "add_layer_norm" not in calls
    expected_loss, expected = loss_and_gradients(model_of(between).eval())
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for given, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(given, wanted, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"norm_placement": "both"},
        {"norm_placement": "both", "bias_dropout_fusion": True},
        {"norm_zero_centered": True},
        {"gpt_j_residual": True, "gpt_j_tied": True, "bias_dropout_fusion": True},
        {"qk_norm": "head", "rope_fusion": True, **ROTARY},
        {"use_qk_layernorm": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_fused_norms_compute_what_plain_ones_do(calls, settings, norm):
    fused = {f"{norm}_fusion": True, "norm": norm}
    loss, gradients = loss_and_gradients(model_of(settings | fused).eval())
    name = "layer_norm" if norm == "layernorm" else norm.replace("norm", "_norm")
    assert (f"add_{name}" in calls) == ("gpt_j_residual" not in settings)
    assert name in calls
    assert "split_rotary" not in calls
    plain = {key: False if key.endswith("fusion") else value for key, value in settings.items()}
    expected_loss, expected = loss_and_gradients(model_of(plain | {"norm": norm}).eval())
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for given, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(given, wanted, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "parameter"),
    [
        ({CAUSAL: True, "precision": "bfloat16"}, "scaled-upper-triang-masked-softmax-fusion"),
        ({MASKED: True, "precision": "bfloat16"}, "scaled-masked-softmax-fusion"),
        ({"bias_gelu_fusion": True}, "bias-gelu-fusion"),
        ({"bias_dropout_fusion": True}, "bias-dropout-fusion"),
        ({"rope_fusion": True, **ROTARY}, "rope-fusion"),
        ({"layernorm_fusion": True}, "layernorm-fusion"),
        ({"rmsnorm_fusion": True, "norm": "rmsnorm"}, "rmsnorm-fusion"),
        ({"glu_fusion": True, "activation": "geglu"}, "glu-fusion"),
    ],
)
def test_required_operator_that_is_unavailable_is_refused_with_the_reason(settings, parameter):
    with refused(KernelUnavailable, parameter, "NVIDIA GPU", "'cpu'", '"auto"'):
        build_plan(*specs_from(settings), SINGLE_PROCESS, vocab_size=11)


@pytest.mark.parametrize("settings", [{}, {"precision": "bfloat16"}], ids=["fp32", "bf16"])
def test_the_loss_is_fused(calls, settings):
    def loss_and_gradients_of(choice):
        resolved = resolved_from(settings | {"loss_fusion": choice})
        model = build_model(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=11)
        if settings:
            model = model.bfloat16()
        tokens = torch.randint(0, 11, (2, 13), generator=torch.Generator().manual_seed(0))
        loss = model(tokens[:, :-1], (tokens[:, 1:], torch.full((2, 12), 1 / 24)))
        loss.backward()
        return loss, [parameter.grad for parameter in model.parameters()]

    loss, gradients = loss_and_gradients_of(True)
    ((logits, labels, weights, given, width), _), *_ = calls["cross_entropy"]
    assert (tuple(logits.shape), tuple(labels.shape), given, width) == ((24, 11), (24,), None, 11)
    torch.testing.assert_close(weights, torch.full((24,), 1 / 24))
    calls.clear()
    expected_loss, expected = loss_and_gradients_of(False)
    assert not calls
    torch.testing.assert_close(loss, expected_loss)
    for given, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(given, wanted)


def test_the_loss_of_a_cpu_is_plain_without_a_word(caplog):
    with caplog.at_level(logging.INFO):
        model = build_model(*specs_from({}), SINGLE_PROCESS, vocab_size=11)
    assert model.loss_fn.operator is None
    assert not [message for message in caplog.messages if "cross_entropy" in message]


def test_a_required_fused_loss_that_is_unavailable_is_refused_with_the_reason():
    with refused(KernelUnavailable, "loss-fusion", "NVIDIA GPU"):
        build_model(*specs_from({"loss_fusion": True}), SINGLE_PROCESS, vocab_size=11)


def test_the_trial_of_the_rotation_has_the_heads_and_pairs_of_the_model(calls, monkeypatch, tmp_path):
    tried = []

    def timed(operator, args):
        tried.append(shapes(args))
        return (1.0, 2.0)

    monkeypatch.setattr(choice, "time_forms", timed)
    settings = {"pos_emb": "rotary", "rotary_pct": 0.5, "num_kv_heads": 2, "rope_fusion": "auto"}
    model_of(settings)
    assert tried == [[(12, 2, 6, 4), (12, 2, 2, 4), (12, 1), (12, 1)], [(12, 2, 40), (12, 1), (12, 1), 2, 4]]
    stored = [path.read_text() for path in (tmp_path / "cache" / "decisions").iterdir()]
    assert sum(shows(text, "12, 2, 2", "4") for text in stored) == 1


def test_compiled_layers_take_the_plain_form_of_an_operator_under_auto(calls, monkeypatch):
    monkeypatch.setattr(choice, "time_forms", lambda *_: (1.0, 2.0))
    settings = {**LLAMA, **dict.fromkeys(LLAMA_FUSIONS, "auto")}
    model = model_of(settings)
    calls.clear()
    loss, gradients = loss_and_gradients(model)
    assert set(calls) == {"rms_norm", "rms_norm.with_input", "add_rms_norm", "bias_swiglu", "split_rotary"}
    compiled = model_of(settings)
    calls.clear()
    for layer in compiled.stack[1:-2]:
        layer.compiled = torch.compile(layer.block, backend="aot_eager", fullgraph=True)
    found, found_gradients = loss_and_gradients(compiled)
    # The final norm is not compiled.
    assert {name: len(made) for name, made in calls.items()} == {"rms_norm": 1}
    assert found == pytest.approx(loss, rel=1e-5)
    for given, wanted in zip(found_gradients, gradients, strict=True):
        torch.testing.assert_close(given, wanted, atol=2e-6, rtol=1e-4)


def test_auto_selects_the_reference_if_fused_is_unavailable():
    settings = {
        **ROTARY,
        **dict.fromkeys((CAUSAL, MASKED, "bias_gelu_fusion", "bias_dropout_fusion"), "auto"),
        **dict.fromkeys(("rope_fusion", "layernorm_fusion"), "auto"),
    }
    model = model_of(settings)
    layer = model.stack[1]
    assert isinstance(layer.attention.core, DenseCore)
    assert layer.attention.position.operator is None
    assert layer.mlp.bias_activation is None
    assert layer.bias_dropout_add is add_dropped
    # The tanh form stays: which machine trains decides nothing about the model.
    assert loss_and_gradients(model)[0] == loss_and_gradients(model_of({**ROTARY, "openai_gelu": True}))[0]


def test_layers_of_llama_take_all_their_fused_operators(calls):
    fused = model_of({**LLAMA, **dict.fromkeys(LLAMA_FUSIONS, True)})
    loss, gradients = loss_and_gradients(fused)
    # Two norms in each of three layers, the second of a sum, and one at the end.
    assert {name: len(made) for name, made in calls.items()} == {
        "rms_norm": 1,
        "rms_norm.with_input": 3,
        "add_rms_norm": 3,
        "bias_swiglu": 3,
        "split_rotary": 3,
    }
    expected_loss, expected = loss_and_gradients(model_of(LLAMA))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for given, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(given, wanted, atol=2e-6, rtol=1e-4)


def test_fused_layers_of_llama_in_bfloat16_are_within_its_rounding(calls):
    def gradients_of(settings, dtype=torch.bfloat16):
        model = model_of(settings).to(dtype)
        return [gradient.float() for gradient in loss_and_gradients(model)[1]]

    exact = gradients_of(LLAMA, torch.float32)
    plain = gradients_of(LLAMA)
    fused = gradients_of({**LLAMA, **dict.fromkeys(LLAMA_FUSIONS, True)})
    assert set(calls) == {"rms_norm", "rms_norm.with_input", "add_rms_norm", "bias_swiglu", "split_rotary"}
    for given, rounded, wanted in zip(fused, plain, exact, strict=True):
        # Rounding once where the plain form rounds after every operator makes no larger error.
        allowed = 1.5 * (rounded - wanted).norm() + 2**-9 * wanted.norm()
        assert (given - wanted).norm() <= allowed


def stored_bytes(model):
    """Return the bytes that the forward pass keeps for the backward pass."""
    kept = {}

    def remember(tensor):
        kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    tokens = torch.randint(0, 11, (2, 13), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        model.loss_fn(model(tokens[:, :-1]), (tokens[:, 1:], torch.full((2, 12), 1 / 24)))
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "reglu", "bilinear"])
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_gated_product_that_is_computed_again_changes_no_result(calls, activation, is_fused, has_bias):
    if is_fused and activation not in ("swiglu", "geglu"):
        pytest.skip("there is no kernel")
    settings = {"activation": activation, "glu_fusion": is_fused, "use_bias_in_mlp": has_bias}
    kept = model_of(settings | {"recompute_gated_product": False})
    again = model_of(settings | {"recompute_gated_product": True})
    loss, gradients = loss_and_gradients(again)
    expected_loss, expected = loss_and_gradients(kept)
    assert loss == expected_loss
    for given, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(given, wanted, atol=1e-6, rtol=1e-5)
    # At least the product of each of three layers: 24 tokens, 64 channels of float32.
    assert stored_bytes(kept) - stored_bytes(again) >= 3 * 24 * 64 * 4


@pytest.mark.parametrize(
    ("settings", "recomputes"),
    [
        ({}, True),
        ({"glu_fusion": False}, False),
        ({"checkpoint_activations": True}, False),
        ({"recompute_gated_product": False}, False),
        ({"lora_rank": 2, "lora_target_modules": ["down"], "lora_base": "unread"}, False),
    ],
    ids=str,
)
def test_a_gated_product_is_computed_again_under_auto_where_a_kernel_does(calls, settings, recomputes):
    model = model_of({"activation": "swiglu", "glu_fusion": True} | settings)
    assert model.stack[1].mlp.recomputes_product == recomputes


@pytest.mark.parametrize("fusion", [False, "auto"])
def test_clamped_gates_use_pytorchs_operators_and_say_why(calls, caplog, fusion):
    settings = {"activation": "swiglu", "glu_fusion": fusion, "glu_limit": 0.3, "glu_up_offset": 1.0}
    with caplog.at_level("INFO"):
        kept = model_of(settings | {"recompute_gated_product": False})
    assert "the fused ones have no limit, alpha or offset" in caplog.text
    again = model_of(settings | {"recompute_gated_product": True})
    assert not model_of(settings).stack[1].mlp.recomputes_product
    loss, gradients = loss_and_gradients(again)
    expected_loss, expected = loss_and_gradients(kept)
    assert (loss, set(calls)) == (expected_loss, set())
    assert loss != loss_and_gradients(model_of({"activation": "swiglu"}))[0]
    for given, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(given, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("rank", "experts", "adapters"),
    [
        (4, uncompiled_grouped_product, uncompiled_grouped_product),
        (6, uncompiled_grouped_product, looped_product),
        (0, uncompiled_grouped_product, None),
    ],
)
def test_a_rank_that_is_no_multiple_of_16_bytes_takes_the_loop_and_says_why(caplog, rank, experts, adapters):
    settings = {"moe_num_experts": 3, "moe_expert_width": 16, "lora_rank": rank}
    with caplog.at_level("INFO"):
        model = model_of(settings | ({"lora_base": "unread"} if rank else {}))
    blocks = next(module for module in model.modules() if isinstance(module, ExpertBlocks))
    assert blocks.product is experts
    assert {each.product for each in blocks.adapters.values()} == ({adapters} if rank else set())
    assert ("set multiples of 4" in caplog.text) == (adapters is looped_product)


def test_a_gated_product_is_computed_again_under_autocast():
    settings = {"activation": "swiglu", "use_bias_in_mlp": True}

    def gradients_of(recomputes):
        model = model_of(settings | {"recompute_gated_product": recomputes})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_and_gradients(model)[1]

    for given, wanted in zip(gradients_of(True), gradients_of(False), strict=True):
        assert given.dtype == wanted.dtype
        torch.testing.assert_close(given, wanted, atol=2e-3, rtol=2e-2)


def test_layers_of_llama_that_are_left_open_are_plain_where_they_cannot_be_fused():
    settings = {**LLAMA, **dict.fromkeys(LLAMA_FUSIONS, "auto")}
    model = model_of(settings)
    assert model.stack[1].norm1.operator is norms._rms_norm
    assert model.stack[1].mlp.gated_activation is None
    assert loss_and_gradients(model)[0] == loss_and_gradients(model_of(LLAMA))[0]


@pytest.mark.parametrize(
    ("fused_ms", "uses"), [(1.0, "fused"), (3.0, "plain")], ids=["when faster", "when slower"]
)
@pytest.mark.parametrize("name", [CAUSAL, MASKED])
def test_scores_that_are_made_anyway_take_the_faster_softmax(calls, monkeypatch, name, fused_ms, uses):
    tried = []

    def timed(operator, args):
        tried.append((operator.name, tuple(args[0].shape)))
        return (fused_ms, 2.0)

    monkeypatch.setattr(choice, "time_forms", timed)
    model = model_of({name: "auto", "apply_query_key_layer_scaling": True})
    assert isinstance(model.stack[1].attention.core, SoftmaxCore)
    calls.clear()
    loss = loss_and_gradients(model)[0]
    assert (len(calls) > 0) == (uses == "fused")
    assert loss == pytest.approx(loss_and_gradients(model_of({}))[0], rel=1e-5)
    assert {shape for _, shape in tried} == {(2, 6, 12, 12)}


def test_each_decision_is_logged_once_for_all_layers(calls, caplog):
    with caplog.at_level(logging.INFO):
        model_of({"norm": "apexlayernorm"})
        assert caplog.messages == [
            "apex_layer_norm: for this test",
            "attention of 3 global layers: PyTorch's scaled_dot_product_attention with is_causal",
        ]


def test_missing_apex_is_replaced_by_pytorch_and_logged(caplog):
    with caplog.at_level(logging.INFO):
        loss, _ = loss_and_gradients(model_of({"norm": "apexlayernorm"}))
    (message,) = [message for message in caplog.messages if "apex" in message]
    assert message.startswith("apex_layer_norm: PyTorch's kernel, because apex's layer norm requires an")
    assert loss == loss_and_gradients(model_of({}))[0]


@pytest.mark.parametrize("all_can", [True, False])
def test_all_ranks_choose_the_same(calls, monkeypatch, all_can):
    asked = []

    def all_reduce(flag, *, op, group):
        asked.append((flag.item(), op, group))
        flag.fill_(int(all_can))

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(choice, "time_forms", lambda *_: (1.0, 2.0))
    two = Group(0, 2, "control", (0, 1))
    chosen = choose_operators(
        *specs_from({"bias_gelu_fusion": "auto", "norm": "apexlayernorm"}),
        Groups(SINGLE_RANK, SINGLE_RANK, SINGLE_RANK, SINGLE_RANK, two),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    assert asked == [(1, distributed.ReduceOp.MIN, "control")] * 2
    assert (chosen.bias_gelu is not None, chosen.norm is not None) == (all_can, all_can)


def choose_where_only_rank_0_has_apex() -> list[bool | str]:
    groups = create_groups(1, 0)
    mine = Availability(groups.world.rank == 0, "apex here" if groups.world.rank == 0 else "none here")
    operators.apex_layer_norm = dataclasses.replace(
        neox_kernels.apex_layer_norm, availability=lambda device, dtype, *, may_build: mine
    )
    told = []
    operators.logger.info = lambda *message: told.append(message[0] % message[1:])
    chosen = choose_operators(
        *specs_from({"norm": "apexlayernorm"}, devices=2),
        groups,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    return [chosen.norm is None, told[0]]


def test_ranks_on_different_hosts_vote():
    assert run_ranks(choose_where_only_rank_0_has_apex, size=2) == [
        [True, "apex_layer_norm: PyTorch's kernel, because another rank cannot use it"],
        [True, "apex_layer_norm: PyTorch's kernel, because none here"],
    ]

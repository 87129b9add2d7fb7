"""Each layer against the plain formula, on one rank."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from neox_model.assembly.model import build_model
from neox_model.errors import LayoutError
from neox_model.initialization import INIT_METHODS, build_init_method, initialize_parameters
from neox_model.layers.activations import ACTIVATIONS, GATED_ACTIVATIONS, clamped_swiglu
from neox_model.layers.attention import DenseCore, ParallelAttention, SoftmaxCore
from neox_model.layers.attention.dense import hidden_keys
from neox_model.layers.attention.kv_cache import logits_in_parts
from neox_model.layers.embedding import Embedding
from neox_model.layers.lm_head import LMHead, LMLoss, gather_vocabulary
from neox_model.layers.mlp import MLP, GatedMLP
from neox_model.layers.norms import NORMS
from neox_model.layers.positions import LearnedPosition, RotaryPosition, SinusoidalPosition
from neox_model.layers.residual_layer import add_dropped
from neox_model.layers.transformer_layer import TransformerLayer
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK
from support.refusals import refused
from support.settings import specs_from

WIDTH, HEADS, LENGTH, BATCH = 24, 6, 7, 3
NORMAL = build_init_method("normal", std=0.5, hidden_size=WIDTH, num_layers=2)


def started(module: nn.Module) -> nn.Module:
    """Give `module` weights large enough to show mistakes, including biases and norms."""
    initialize_parameters(module, seed=1)
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
    return module


def hidden(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(LENGTH, BATCH, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attention(**options) -> ParallelAttention:
    return started(
        ParallelAttention(
            WIDTH, HEADS, **{"core": DenseCore, "init": NORMAL, "output_init": NORMAL, **options}
        )
    )


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))),
        ("relu", lambda x: x * (x > 0)),
        ("squared_relu", lambda x: x * x * (x > 0)),
        ("softsign", lambda x: x / (1 + x.abs())),
        ("swish", lambda x: x * torch.sigmoid(x)),
        ("silu", lambda x: x * torch.sigmoid(x)),
        ("mish", lambda x: x * torch.tanh(torch.log1p(torch.exp(x)))),
    ],
)
def test_activation_follows_its_formula(name, formula):
    x = torch.linspace(-5, 5, 41)
    torch.testing.assert_close(ACTIVATIONS[name](x), formula(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("geglu", functional.gelu),
        ("geglu_tanh", partial(functional.gelu, approximate="tanh")),
        ("swiglu", functional.silu),
        ("reglu", functional.relu),
        ("glu", lambda x: 1 / (1 + torch.exp(-x))),
        ("bilinear", lambda x: x),
    ],
)
def test_gated_activation_is_of_the_gate(name, formula):
    x = torch.linspace(-5, 5, 41, dtype=torch.float64)
    torch.testing.assert_close(GATED_ACTIVATIONS[name](x), formula(x))


ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check_against_float64(function, formula, inputs):
    """Values and gradients, each by its largest error relative to the largest value."""
    exact = [each.detach().double().requires_grad_() for each in inputs]
    found, expected = function(*inputs), formula(*exact)
    assert found.dtype == inputs[0].dtype
    above = torch.linspace(0.5, 1.5, found.shape[-1])
    pairs = [
        (found, expected),
        *zip(
            torch.autograd.grad(found, inputs, above.to(found.dtype).expand_as(found)),
            torch.autograd.grad(expected, exact, above.double().expand_as(expected)),
            strict=True,
        ),
    ]
    for mine, theirs in pairs:
        error = (mine.double() - theirs).abs().max() / theirs.abs().max()
        assert error < 3 * ROUNDING[inputs[0].dtype]


@pytest.mark.parametrize("dtype", ROUNDING)
def test_squared_relu_in_every_precision(dtype):
    x = torch.linspace(-4, 4, 64, dtype=dtype).requires_grad_()
    check_against_float64(ACTIVATIONS["squared_relu"], lambda x: torch.where(x > 0, x * x, 0.0), [x])


@pytest.mark.parametrize(
    ("dtype", "has_bias"), [*((dtype, False) for dtype in ROUNDING), (torch.float32, True)]
)
@pytest.mark.parametrize(
    ("limit", "alpha", "offset"), [(1.5, 1.702, 1.0), (None, 0.5, -0.25), (0.5, 1.0, 0.0)]
)
def test_clamped_swiglu_follows_its_formula(limit, alpha, offset, has_bias, dtype):
    """In 16 bits, a sum with a bias would be rounded to the other side of a limit, where slopes jump."""
    generator = torch.Generator().manual_seed(3)
    draw = [torch.randn(4, 32, generator=generator), torch.randn(4, 32, generator=generator)]
    draw += [torch.randn(32, generator=generator) for _ in range(2 if has_bias else 0)]
    inputs = [each.to(dtype).requires_grad_() for each in draw]

    def ours(up, gate, up_bias=None, gate_bias=None):
        options = {"limit": limit, "alpha": alpha, "up_offset": offset}
        return clamped_swiglu(up, gate, up_bias, gate_bias, **options)

    def formula(up, gate, up_bias=0.0, gate_bias=0.0):
        up, gate = up + up_bias, gate + gate_bias
        highest = math.inf if limit is None else limit
        gate = torch.where(gate > highest, highest, gate)
        up = torch.where(up > highest, highest, torch.where(up < -highest, -highest, up))
        return (up + offset) * gate / (1 + torch.exp(-alpha * gate))

    check_against_float64(ours, formula, inputs)


def test_clamped_swiglu_is_that_of_gpt_oss():
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    theirs = GptOssExperts(GptOssConfig(hidden_size=4, intermediate_size=8, num_local_experts=2))
    up, gate = torch.randn(5, 8) * 6, torch.randn(5, 8) * 6
    expected = theirs._apply_gate(torch.stack([gate, up], dim=-1).flatten(1))
    found = clamped_swiglu(up, gate, None, None, limit=7.0, alpha=1.702, up_offset=1.0)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        (
            "layernorm",
            lambda x, e: (
                (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + e).sqrt()
            ),
        ),
        ("rmsnorm", lambda x, e: x / (x.square().mean(-1, keepdim=True) + e).sqrt()),
        ("scalenorm", lambda x, e: x / torch.clamp(x.norm(dim=-1, keepdim=True), min=e)),
    ],
)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_follows_its_formula(name, formula, zero_centered):
    norm = started(NORMS[name](WIDTH, 0.3, zero_centered=zero_centered))
    assert (norm.weight.mean() < 0.5) == zero_centered
    expected = formula(hidden(), 0.3) * (norm.weight + zero_centered)
    expected = expected + (norm.bias if name == "layernorm" else 0)
    torch.testing.assert_close(norm(hidden()), expected, atol=1e-6, rtol=1e-5)
    assert (name == "layernorm") == hasattr(norm, "bias")
    assert norm.weight.numel() == (1 if name == "scalenorm" else WIDTH)


def test_a_norm_without_parameters_is_a_layer_norm():
    norm = NORMS["non_parametric_layernorm"](WIDTH, 0.3, bias=True, zero_centered=True)
    assert not list(norm.parameters())
    expected = functional.layer_norm(hidden(), (WIDTH,), eps=0.3)
    torch.testing.assert_close(norm(hidden()), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm", "scalenorm"])
def test_a_weight_that_is_stored_minus_one_keeps_its_digits(name):
    norm = NORMS[name](WIDTH, 1e-5, zero_centered=True)
    initialize_parameters(norm, seed=1)
    # 1 + 2^-10 is 1 in bfloat16.
    norm.weight.data += 2**-10
    norm, x = norm.to(torch.bfloat16), hidden(dtype=torch.bfloat16).requires_grad_()
    result, wide = norm(x), norm(x.float())
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, wide.to(torch.bfloat16), rtol=0, atol=0)
    given = torch.autograd.grad(result.sum(), norm.weight)[0]
    wanted = torch.autograd.grad(wide.sum(), norm.weight)[0]
    torch.testing.assert_close(given, wanted)


def test_a_layer_norm_without_bias_has_only_a_weight():
    norm = started(NORMS["layernorm"](WIDTH, 0.3, bias=False))
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    centered = hidden() - hidden().mean(-1, keepdim=True)
    expected = norm.weight * centered / (centered.square().mean(-1, keepdim=True) + 0.3).sqrt()
    torch.testing.assert_close(norm(hidden()), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_norm_of_bfloat16_is_computed_in_float32(name):
    norm = started(NORMS[name](WIDTH, 1e-5))
    x = hidden(dtype=torch.bfloat16) * 10
    expected = norm(x.float()).to(torch.bfloat16)
    result = norm.to(torch.bfloat16)(x)
    assert result.dtype == torch.bfloat16
    # One rounding of the weights and one of the result lie between them.
    torch.testing.assert_close(result.float(), expected.float(), rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rms_norm_rounds_once(dtype):
    norm = started(NORMS["rmsnorm"](WIDTH, 1e-8)).to(dtype)
    x = hidden(dtype=dtype) * 10
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-8)
    torch.testing.assert_close(norm(x), (wide * scale * norm.weight).to(dtype), atol=0, rtol=0)


def test_rms_norm_of_16_bits_with_a_float32_weight():
    norm, x = started(NORMS["rmsnorm"](WIDTH, 1e-8)), hidden(dtype=torch.float16)
    result = norm(x)
    assert result.dtype == torch.float16
    torch.testing.assert_close(result, norm(x.float()).half(), atol=0, rtol=0)


def test_mlp_is_down_of_activation_of_up():
    mlp = started(MLP(WIDTH, 40, activation=ACTIVATIONS["gelu"], init=NORMAL, output_init=NORMAL))
    expected = functional.linear(
        functional.gelu(functional.linear(hidden(), mlp.up.weight, mlp.up.bias)),
        mlp.down.weight,
        mlp.down.bias,
    )
    output, bias = mlp(hidden())
    assert bias is None
    torch.testing.assert_close(output, expected)


def test_mlp_passes_its_bias_to_the_fused_function_and_returns_the_output_bias():
    seen = []

    def fused(x, bias):
        seen.append(bias)
        return functional.gelu(x + bias)

    options = {"activation": functional.gelu, "init": NORMAL, "output_init": NORMAL}
    mlp = started(MLP(WIDTH, 40, bias_activation=fused, skip_bias=True, **options))
    plain = started(MLP(WIDTH, 40, **options))
    output, bias = mlp(hidden())
    assert seen[0] is mlp.up.bias
    torch.testing.assert_close(output + bias, plain(hidden())[0])


def test_mlp_without_biases_has_none():
    mlp = started(MLP(WIDTH, 40, activation=functional.gelu, init=NORMAL, output_init=NORMAL, bias=False))
    assert [name for name, _ in mlp.named_parameters()] == ["up.weight", "down.weight"]
    expected = functional.gelu(hidden() @ mlp.up.weight.T) @ mlp.down.weight.T
    torch.testing.assert_close(mlp(hidden())[0], expected)


def test_gated_mlp_multiplies_up_by_the_activated_gate():
    mlp = started(GatedMLP(WIDTH, 40, activation=functional.gelu, init=NORMAL, output_init=NORMAL))
    x = hidden()
    up = functional.linear(x, mlp.up.weight, mlp.up.bias)
    gate = functional.linear(x, mlp.gate.weight, mlp.gate.bias)
    expected = functional.linear(up * functional.gelu(gate), mlp.down.weight, mlp.down.bias)
    torch.testing.assert_close(mlp(x)[0], expected)


def test_gated_mlp_hands_its_biases_to_the_fused_function():
    seen = []

    def fused(up, gate, up_bias, gate_bias):
        seen.extend((up_bias, gate_bias))
        return (up + up_bias) * functional.gelu(gate + gate_bias)

    options = {"activation": functional.gelu, "init": NORMAL, "output_init": NORMAL}
    mlp = started(GatedMLP(WIDTH, 40, gated_activation=fused, **options))
    plain = started(GatedMLP(WIDTH, 40, **options))
    torch.testing.assert_close(mlp(hidden())[0], plain(hidden())[0])
    assert seen[0] is mlp.up.bias
    assert seen[1] is mlp.gate.bias


def test_sinusoidal_is_all_sines_then_all_cosines():
    table = SinusoidalPosition(6)(torch.tensor([[0], [3]]))
    angles = [3 / 10000 ** (2 * i / 6) for i in range(3)]
    expected = [[0.0] * 3 + [1.0] * 3, [math.sin(a) for a in angles] + [math.cos(a) for a in angles]]
    torch.testing.assert_close(table, torch.tensor(expected).unsqueeze(1))


def test_rotary_turns_channel_pairs_by_place_times_frequency():
    rotary = RotaryPosition(head_width=8, fraction=0.5, base=100.0)
    query = torch.randn(5, 1, 2, 8)
    rotated, _ = rotary(query, query)
    for place in range(5):
        for channel in range(2):
            angle = place * 100.0 ** (-2 * channel / 4)
            a, b = query[place, ..., channel], query[place, ..., channel + 2]
            torch.testing.assert_close(
                rotated[place, ..., channel], a * math.cos(angle) - b * math.sin(angle)
            )
            torch.testing.assert_close(
                rotated[place, ..., channel + 2], b * math.cos(angle) + a * math.sin(angle)
            )
    assert torch.equal(rotated[..., 4:], query[..., 4:])


def test_rotary_from_a_later_start_equals_the_tail_of_the_whole():
    rotary = RotaryPosition(head_width=8)
    query, key = torch.randn(9, 2, 3, 8), torch.randn(9, 2, 3, 8)
    whole = rotary(query, key)
    tail = RotaryPosition(head_width=8)(query[6:], key[6:], 6)
    torch.testing.assert_close((whole[0][6:], whole[1][6:]), tail)


def test_rotary_scores_depend_on_distance_alone():
    rotary = RotaryPosition(head_width=8, fraction=0.75)
    query, key = torch.randn(8), torch.randn(8)
    rows = rotary(query.expand(12, 1, 1, 8), key.expand(12, 1, 1, 8))
    scores = torch.einsum("sbnk,tbnk->st", *rows)
    torch.testing.assert_close(scores[5, 2], scores[11, 8])
    assert abs(float(scores[5, 2] - scores[5, 4])) > 1e-4


def test_rotary_refuses_an_odd_number_of_channels():
    with refused(LayoutError, "rotary-pct 0.3", "10 channels", "3"):
        RotaryPosition(head_width=10, fraction=0.3)


def test_rotary_of_16_bits_has_float32_angles():
    rotary = RotaryPosition(head_width=4)
    query = torch.ones(2049, 1, 1, 4, dtype=torch.bfloat16)
    rotated = rotary(query, query)[0][2047, 0, 0, 0].float()
    # bfloat16 would round place 2047 to 2048, and turn the sign.
    assert float(rotated) == pytest.approx(math.cos(2047) - math.sin(2047), abs=0.01)


def reference_attention(module: ParallelAttention, x: torch.Tensor) -> torch.Tensor:
    """Head by head, row by row, from the interleaved query-key-value rows of the weight."""
    projected = functional.linear(x, module.qkv.weight, module.qkv.bias)
    width = WIDTH // HEADS
    contexts = []
    for head in range(HEADS):
        query, key, value = (
            projected[..., (3 * head + part) * width : (3 * head + part + 1) * width] for part in range(3)
        )
        scores = torch.einsum("sbk,tbk->bst", query, key) / math.sqrt(width)
        later = torch.triu(torch.ones(len(x), len(x), dtype=torch.bool), diagonal=1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        contexts.append(torch.einsum("bst,tbk->sbk", weights, value))
    return functional.linear(torch.cat(contexts, -1), module.dense.weight, module.dense.bias)


def test_attention_orders_query_key_value_per_head():
    module = attention()
    torch.testing.assert_close(module(hidden())[0], reference_attention(module, hidden()))


@pytest.mark.parametrize("coefficient", [1.0, 3.0])
def test_softmax_core_equals_dense_core(coefficient):
    def softmax(scores, scale, masked_out):
        if masked_out is None:
            masked_out = hidden_keys(scores.shape[-2], scores.shape[-1], None, scores.device)
        return (scores.float() * scale).masked_fill(masked_out, float("-inf")).softmax(-1).to(scores.dtype)

    dense = attention()
    other = attention(
        core=partial(SoftmaxCore, softmax=softmax, head_width=WIDTH // HEADS, coefficient=coefficient)
    )
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2]] * BATCH)
    torch.testing.assert_close(other(hidden())[0], dense(hidden())[0])
    torch.testing.assert_close(other(hidden(), documents)[0], dense(hidden(), documents)[0])


def test_documents_do_not_see_each_other():
    module = attention()
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * BATCH)
    x = hidden()
    apart = torch.cat((module(x[:3])[0], module(x[3:])[0]))
    torch.testing.assert_close(module(x, documents)[0], apart)


def test_attention_dropout_only_while_training():
    module = attention(core=partial(DenseCore, dropout=0.5))
    plain = attention()
    torch.manual_seed(0)
    assert not torch.allclose(module(hidden())[0], plain(hidden())[0])
    torch.testing.assert_close(module.eval()(hidden())[0], plain(hidden())[0])


def layer(**options) -> TransformerLayer:
    return started(
        TransformerLayer(
            attention=partial(
                ParallelAttention,
                WIDTH,
                HEADS,
                core=DenseCore,
                init=NORMAL,
                output_init=NORMAL,
                position=partial(RotaryPosition, head_width=WIDTH // HEADS),
            ),
            mlp=partial(MLP, WIDTH, 40, activation=functional.gelu, init=NORMAL, output_init=NORMAL),
            norm=partial(NORMS["layernorm"], WIDTH, 1e-5),
            **options,
        )
    )


def test_layer_is_prenorm():
    block, x = layer(), hidden()
    middle = x + block.attention(block.norm1(x))[0]
    torch.testing.assert_close(block(x), middle + block.mlp(block.norm2(middle))[0])


def test_layer_with_residual_after_the_norm():
    block, x = layer(residual_after_norm=True), hidden()
    first = block.norm1(x)
    second = block.norm2(first + block.attention(first)[0])
    torch.testing.assert_close(block(x), second + block.mlp(second)[0])


def test_layer_with_parallel_residual():
    block, x = layer(parallel_residual=True), hidden()
    expected = x + block.attention(block.norm1(x))[0] + block.mlp(block.norm2(x))[0]
    torch.testing.assert_close(block(x), expected)


def test_layer_with_norms_of_outputs():
    block, x = layer(norm_placement="after"), hidden()
    assert (block.norm1, block.norm2) == (None, None)
    middle = x + block.norm1_after(block.attention(x)[0])
    torch.testing.assert_close(block(x), middle + block.norm2_after(block.mlp(middle)[0]))


def test_layer_with_norms_on_both_sides():
    block, x = layer(norm_placement="both"), hidden()
    middle = x + block.norm1_after(block.attention(block.norm1(x))[0])
    torch.testing.assert_close(block(x), middle + block.norm2_after(block.mlp(block.norm2(middle))[0]))


def test_branches_of_a_parallel_residual_can_share_a_norm():
    block, x = layer(parallel_residual=True, shares_norm=True), hidden()
    assert not any(name.startswith("norm2") for name, _ in block.named_parameters())
    normed = block.norm1(x)
    torch.testing.assert_close(block(x), x + block.attention(normed)[0] + block.mlp(normed)[0])


def test_layer_passes_documents_on():
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2]] * BATCH)
    block = layer()
    result, passed = block((hidden(), documents))
    assert passed is documents
    assert not torch.allclose(result, block(hidden()))
    torch.testing.assert_close(layer(return_hidden_only=True)((hidden(), documents)), result)


def test_add_dropped_drops_the_branch_and_not_the_residual():
    torch.manual_seed(0)
    residual = torch.full((1000,), 3.0)
    result = add_dropped(torch.ones(1000), torch.ones(1000), residual, 0.5, True)
    assert set(result.tolist()) == {3.0, 7.0}
    assert add_dropped(torch.ones(1), None, torch.ones(1), 0.5, False).item() == 2.0


def test_embedding_is_sequence_first_and_adds_positions():
    embedding = started(
        Embedding(11, WIDTH, init=NORMAL, position=partial(LearnedPosition, LENGTH, WIDTH, init=NORMAL))
    )
    tokens = torch.randint(0, 11, (BATCH, LENGTH))
    words, positions = embedding.word_embeddings.weight, embedding.position_embeddings.weight
    result = embedding(tokens)
    assert result.shape == (LENGTH, BATCH, WIDTH)
    assert result.is_contiguous()
    torch.testing.assert_close(result, words[tokens].transpose(0, 1) + positions.unsqueeze(1))
    places = torch.tensor([[0, 1, 0, 1, 2, 3, 0]] * BATCH)
    documents = torch.zeros_like(places)
    result, passed = embedding((tokens, documents, places))
    assert passed is documents
    torch.testing.assert_close(result, (words[tokens] + positions[places]).transpose(0, 1))


def test_head_gives_batch_first_logits_without_a_bias():
    head = started(LMHead(11, WIDTH, init=NORMAL))
    expected = (hidden() @ head.weight.T).transpose(0, 1)
    torch.testing.assert_close(head(hidden()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_are_scaled_as_in_gemma(dtype):
    """In 16 bits the scale is rounded, too: sqrt(3072) = 55.4256 becomes 55.5 in bfloat16."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2TextScaledWordEmbedding

    scale = 3072**0.5
    theirs = Gemma2TextScaledWordEmbedding(11, WIDTH, 0, embed_scale=scale)
    ours = started(Embedding(11, WIDTH, init=NORMAL, scale=scale))
    theirs.weight.data.copy_(ours.word_embeddings.weight.data)
    theirs, ours = theirs.to(dtype), ours.to(dtype)
    tokens = torch.randint(0, 11, (BATCH, LENGTH))
    assert torch.equal(ours(tokens), theirs(tokens).transpose(0, 1))
    ours(tokens).sum().backward()
    theirs(tokens).sum().backward()
    # The first entry is their padding.
    torch.testing.assert_close(ours.word_embeddings.weight.grad[1:], theirs.weight.grad[1:])


def test_only_embeddings_of_tokens_are_scaled():
    embedding = started(
        Embedding(
            11, WIDTH, init=NORMAL, scale=3.0, position=partial(LearnedPosition, LENGTH, WIDTH, init=NORMAL)
        )
    )
    tokens = torch.randint(0, 11, (BATCH, LENGTH))
    words, positions = embedding.word_embeddings.weight, embedding.position_embeddings.weight
    torch.testing.assert_close(
        embedding(tokens), 3.0 * words[tokens].transpose(0, 1) + positions.unsqueeze(1)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_scaled_once_in_the_head_and_in_the_loss(dtype):
    head = started(LMHead(11, WIDTH, init=NORMAL, scale=0.7)).to(dtype)
    given = hidden().to(dtype).requires_grad_()
    labels, mask = torch.randint(0, 11, (BATCH, LENGTH)), torch.rand(BATCH, LENGTH)
    exact = [each.detach().double().requires_grad_() for each in (given, head.weight)]
    logits = 0.7 * (exact[0] @ exact[1].T).transpose(0, 1)
    each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    expected = (each * mask.flatten()).sum()
    found = head(given, (labels, mask), LMLoss(11, scale=0.7, chunk_rows=5))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(head(given).double(), logits, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    gradients = zip(
        torch.autograd.grad(found, (given, head.weight)), torch.autograd.grad(expected, exact), strict=True
    )
    for mine, theirs in gradients:
        torch.testing.assert_close(mine.double(), theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_is_the_weighted_mean_over_tokens_and_so_is_its_gradient(dtype):
    # 700 x 1000 numbers: more than one block of the cross entropy.
    logits = (torch.randn(7, 100, 1000) * 3).to(dtype).requires_grad_()
    labels = torch.randint(0, 1000, (7, 100))
    mask = (torch.rand(7, 100) > 0.3).float()
    loss = LMLoss(1000)(logits, (labels, mask / mask.sum()))
    (gradient,) = torch.autograd.grad(loss, logits)
    plain = logits.detach().float().requires_grad_()
    each = functional.cross_entropy(plain.view(-1, 1000), labels.view(-1), reduction="none")
    expected = (each * mask.view(-1)).sum() / mask.sum()
    (expected_gradient,) = torch.autograd.grad(expected, plain)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient.to(dtype))


def test_loss_of_a_fully_masked_batch_is_zero():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = LMLoss(5)(logits, (torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3)))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_gathered_vocabulary_has_no_padding():
    logits = torch.randn(2, 3, 16)
    torch.testing.assert_close(gather_vocabulary(logits, SINGLE_RANK, 11), logits[..., :11])


def tiny_model() -> nn.Module:
    model = nn.Sequential(Embedding(11, WIDTH, init=NORMAL), layer(), layer(), LMHead(11, WIDTH, init=NORMAL))
    model[0].position_embeddings = LearnedPosition(32, WIDTH, init=NORMAL)
    return started(model).eval()


def test_attention_is_causal():
    model = tiny_model()
    tokens = torch.randint(0, 11, (2, 12))
    logits = model(tokens)
    for place in (3, 11):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        others = model(changed)
        torch.testing.assert_close(others[:, :place], logits[:, :place], rtol=0, atol=0)
        assert not torch.allclose(others[:, place:], logits[:, place:])


def test_logits_with_cached_keys_equal_a_full_forward():
    model = tiny_model()
    tokens = torch.randint(0, 11, (2, 12))
    expected = model(tokens)
    for _ in range(2):  # a second time, to see that nothing is left over
        found = logits_in_parts(model, tokens, (0, 5, 9, 10, 11, 12))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model(tokens), expected)


def normed(x: torch.Tensor, norm: str, over: tuple[int, ...]) -> torch.Tensor:
    """Normalize over dimensions, in the formulas of the papers, with an epsilon of 0.1."""
    if norm in ("layernorm", "non_parametric_layernorm"):
        centered = x - x.mean(over, keepdim=True)
        return centered / (centered.square().mean(over, keepdim=True) + 0.1).sqrt()
    if norm == "rmsnorm":
        return x / (x.square().mean(over, keepdim=True) + 0.1).sqrt()
    return x / x.square().sum(over, keepdim=True).sqrt().clamp(min=0.1)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("form", ["head", "width", "both"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "scalenorm", "non_parametric_layernorm"])
def test_queries_and_keys_are_normalized_before_their_positions(norm, form, zero_centered):
    epsilon = {"rmsnorm": "rms_norm_epsilon", "scalenorm": "scalenorm_epsilon"}.get(norm, "layernorm_epsilon")
    shape = {"use_qk_layernorm": True} if form == "both" else {"qk_norm": form, "num_kv_heads": 2}
    settings = {"norm": norm, epsilon: 0.1, "pos_emb": "rotary", "norm_zero_centered": zero_centered, **shape}
    module = started(build_model(*specs_from(settings), SINGLE_PROCESS, vocab_size=11)).double()
    module = module.stack[1].attention
    keys = shape.get("num_kv_heads", HEADS)
    sharing = HEADS // keys
    projected = torch.randn(LENGTH, BATCH, (HEADS + 2 * keys) * 4, dtype=torch.float64)
    query, key, value = module.heads(projected)
    groups = projected.view(LENGTH, BATCH, keys, sharing + 2, 4)
    expected = [groups[..., :sharing, :].flatten(2, 3), groups[..., sharing, :]]
    weights = dict(module.qk_norm.named_parameters())
    assert {name.partition(".")[0] for name in weights} == (
        set() if norm.startswith("non") else {"both"} if form == "both" else {"query", "key"}
    )
    per_head = form == "head" or (form == "both" and norm in ("rmsnorm", "scalenorm"))
    for place, name in enumerate(("query", "key")):
        own, heads = "both" if form == "both" else name, expected[place].shape[2]
        result = normed(expected[place], norm, (-1,) if per_head else (-2, -1))
        for kind, join in {"weight": torch.mul, "bias": torch.add}.items():
            if f"{own}.{kind}" in weights:
                values = weights[f"{own}.{kind}"] + (zero_centered if kind == "weight" else 0)
                result = join(result, values.view(heads, 4) if values.numel() == 4 * heads else values)
        expected[place] = result
    expected = module.position(*expected)
    for given, wanted in zip((query, key, value), (*expected, groups[..., -1, :]), strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    "settings",
    [
        {"qk_norm": "head", "num_kv_heads": 2, "norm": "rmsnorm", "norm_placement": "both"},
        {"qk_norm": "width", "norm_placement": "after", "norm_zero_centered": True},
        {"use_qk_layernorm": True, "gpt_j_residual": True, "gpt_j_tied": True},
    ],
    ids=str,
)
def test_cached_keys_are_normalized(settings):
    spec = specs_from({"pos_emb": "rotary", **settings})
    model = started(build_model(*spec, SINGLE_PROCESS, vocab_size=11)).eval()
    tokens = torch.randint(0, 11, (2, 12))
    found = logits_in_parts(model, tokens, (0, 5, 9, 10, 11, 12))
    torch.testing.assert_close(found, model(tokens), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("normal", 0.02),
        ("scaled_normal", 0.02 / math.sqrt(2 * 8)),
        ("single_residual_scaled_normal", 0.02 / math.sqrt(8)),
        ("small_init", math.sqrt(2 / (5 * 256))),
        ("wang_init", 2 / (8 * math.sqrt(256))),
        ("xavier_normal", math.sqrt(2 / (256 + 320))),
        ("xavier_uniform", math.sqrt(2 / (256 + 320))),
    ],
)
def test_init_method_has_its_standard_deviation(name, std):
    tensor = torch.empty(256, 320)
    init = build_init_method(name, std=0.02, hidden_size=256, num_layers=8)
    init(tensor, torch.Generator().manual_seed(0))
    assert float(tensor.std()) == pytest.approx(std, rel=0.02)
    assert abs(float(tensor.mean())) < std / 50


@pytest.mark.parametrize(("name", "gain"), [("orthogonal", 2**0.5), ("scaled_orthogonal", (2 / 8) ** 0.5)])
def test_orthogonal_rows_have_the_gain_as_length(name, gain):
    tensor = torch.empty(16, 40)
    init = build_init_method(name, std=0.02, hidden_size=256, num_layers=8)
    init(tensor, torch.Generator().manual_seed(0))
    torch.testing.assert_close(tensor @ tensor.T, gain**2 * torch.eye(16), atol=1e-5, rtol=1e-5)


def test_there_are_nine_init_methods():
    assert len(INIT_METHODS) == 9


def test_a_parameter_starts_by_its_name_and_seed_and_not_by_its_order():
    first = nn.ModuleDict({"a": nn.Module(), "b": LMHead(11, WIDTH, init=NORMAL)})
    second = nn.ModuleDict({"b": LMHead(11, WIDTH, init=NORMAL), "c": LMHead(11, WIDTH, init=NORMAL)})
    initialize_parameters(first, seed=3)
    initialize_parameters(second, seed=3)
    assert torch.equal(first["b"].weight, second["b"].weight)
    assert not torch.equal(second["b"].weight, second["c"].weight)
    initialize_parameters(second, seed=4)
    assert not torch.equal(first["b"].weight, second["b"].weight)


def test_heads_must_divide_the_width():
    with refused(LayoutError, "hidden-size 24", "5 heads"):
        ParallelAttention(24, 5, core=DenseCore, init=NORMAL, output_init=NORMAL)

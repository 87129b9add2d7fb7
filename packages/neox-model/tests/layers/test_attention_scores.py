"""Scale, limit and sinks of attention scores, wide heads and gates, against formulas in float64."""

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention

from neox_model.assembly.model import build_model
from neox_model.layers.attention import DenseCore, FlexCore, FlexScoresCore, LocalPattern, SoftmaxCore
from neox_model.layers.attention.kv_cache import logits_in_parts
from neox_model.layers.cache import Span
from neox_model.layers.positions import AlibiPosition
from neox_model.optim.param_groups import split_by_weight_decay
from neox_model.parallel.groups import SINGLE_PROCESS
from support.settings import specs_from

LENGTH, BATCH, HEADS, WIDTH = 12, 2, 6, 4
SCALE, CAP = 0.9, 1.5
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0, 1, 1] + [2] * 9])
ALL = {
    "head_dim": 6,
    "num_kv_heads": 2,
    "attention_scale": SCALE,
    "attention_softcap": CAP,
    "attention_sinks": True,
    "attention_gate": "element",
}
# Options of cores, and those of the formula.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scale": ({"scale": SCALE}, {"scale": SCALE}),
    "softcap": ({"softcap": CAP}, {"cap": CAP}),
    "sinks": ({"sinks": HEADS}, {}),
    "scale and softcap": ({"scale": SCALE, "softcap": CAP}, {"scale": SCALE, "cap": CAP}),
    "all": ({"scale": SCALE, "softcap": CAP, "sinks": HEADS}, {"scale": SCALE, "cap": CAP}),
}


def heads(count: int = HEADS, seed: int = 0, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (length, BATCH, count, WIDTH)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def inputs_of(shared: int = 3) -> list[Tensor]:
    """Queries, and keys and values that `shared` queries share."""
    return [heads(), *(heads(HEADS // shared, seed=seed) for seed in (1, 2))]


def visible(window: int | None = None, documents: Tensor | None = None) -> Tensor:
    place = torch.arange(LENGTH)
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance <= (LENGTH if window is None else window))
    if documents is None:
        return seen
    return seen & (documents[:, :, None] == documents[:, None])[:, None]


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    *,
    scale: float | None = None,
    cap: float | None = None,
    sink: Tensor | None = None,
    bias: Tensor | float = 0.0,
) -> Tensor:
    """Attention from its definition, with a column for the sink that has no value."""
    shared = query.shape[2] // key.shape[2]
    key, value = (each.repeat_interleave(shared, dim=2) for each in (key, value))
    scores = torch.einsum("sbnk,tbnk->bnst", query, key)
    scores = scores * scale if scale is not None else scores / math.sqrt(query.shape[-1])
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = (scores + bias).masked_fill(~seen, -math.inf)
    if sink is not None:
        column = sink[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.exp() / scores.exp().sum(dim=-1, keepdim=True)
    return torch.einsum("bnst,tbnk->sbnk", weights[..., : key.shape[0]], value)


def filled(core: nn.Module) -> nn.Module:
    """The core in float64, with sinks that are not 0 and of which some are large."""
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.copy_(torch.linspace(-2.0, 3.0, parameter.numel()))
    return core.double()


def assert_same_with_gradients(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    mine, theirs = (torch.autograd.grad((each * weights).sum(), inputs) for each in (found, expected))
    for one, other in zip(mine, theirs, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("coefficient", [1.0, 3.0])
@pytest.mark.parametrize("case", CASES)
def test_stored_scores_equal_the_formula_with_gradients(case, coefficient, window, documents):
    """Layer scaling, the coefficient, changes nothing."""
    options, formula = CASES[case]
    pattern = None if window is None else lambda: LocalPattern(block=1, blocks_before=window)
    core = filled(SoftmaxCore(head_width=WIDTH, coefficient=coefficient, pattern=pattern, **options))
    inputs = inputs_of()
    expected = written_out(*inputs, visible(window, documents), sink=core.sinks, **formula)
    leaves = inputs if core.sinks is None else [*inputs, core.sinks]
    assert_same_with_gradients(core(*inputs, documents), expected, leaves)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("core", [DenseCore(scale=SCALE), SoftmaxCore(head_width=WIDTH, scale=SCALE)])
def test_cores_multiply_products_by_the_scale(core, documents):
    inputs = inputs_of()
    expected = written_out(*inputs, visible(documents=documents), scale=SCALE)
    assert_same_with_gradients(core(*inputs, documents), expected, inputs)


@pytest.mark.parametrize("model", ["gemma2", "gpt_oss"])
def test_limited_scores_and_sinks_are_those_of_transformers(model):
    theirs = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    options = {"softcap": CAP} if model == "gemma2" else {"sinks": HEADS}
    core = filled(SoftmaxCore(head_width=WIDTH, scale=SCALE, **options))
    inputs = inputs_of()
    module = SimpleNamespace(num_key_value_groups=3, training=False, sinks=core.sinks)
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(~visible(), -math.inf)
    capped = {"softcap": CAP} if model == "gemma2" else {}
    heads_first = (each.permute(1, 2, 0, 3) for each in inputs)
    # They compute Gemma's softmax in float32.
    expected, _ = theirs.eager_attention_forward(module, *heads_first, mask, scaling=SCALE, **capped)
    torch.testing.assert_close(core(*inputs), expected.transpose(0, 1), rtol=1e-5, atol=1e-6)


def test_a_bias_by_distance_is_added_to_limited_scores():
    core = filled(SoftmaxCore(head_width=WIDTH, softcap=CAP, position=lambda: AlibiPosition(heads=HEADS)))
    place = torch.arange(LENGTH)
    slopes = torch.tensor(core.position.slopes, dtype=torch.float64)[:, None, None]
    bias = -slopes * (place[:, None] - place).abs()
    inputs = inputs_of()
    assert_same_with_gradients(core(*inputs), written_out(*inputs, visible(), cap=CAP, bias=bias), inputs)


@pytest.mark.parametrize("case", CASES)
def test_a_fused_softmax_receives_limited_scores_and_the_sinks(case):
    """The operators of a requested kernel, whose form without a mask hides later keys itself."""

    def softmax(scores, scale, masked_out):
        if masked_out is None:
            masked_out = ~visible()
        return (scores * scale).masked_fill(masked_out, -math.inf).softmax(-1)

    options, formula = CASES[case]
    core = filled(SoftmaxCore(head_width=WIDTH, softmax=softmax, coefficient=2.0, **options))
    inputs = inputs_of()
    expected = written_out(*inputs, visible(), sink=core.sinks, **formula)
    leaves = inputs if core.sinks is None else [*inputs, core.sinks]
    assert_same_with_gradients(core(*inputs), expected, leaves)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("case", CASES)
def test_flex_attention_equals_the_formula(case, window, documents):
    """Without compilation its implementation is torch's operators; it has no backward pass on a CPU."""
    options, formula = CASES[case]
    pattern = None if window is None else lambda: LocalPattern(block=1, blocks_before=window)
    core = filled(FlexScoresCore(is_compiled=False, head_width=WIDTH, pattern=pattern, **options))
    inputs = [each.detach() for each in inputs_of()]
    found = core.requires_grad_(False)(*inputs, documents)
    expected = written_out(*inputs, visible(window, documents), sink=core.sinks, **formula)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_flex_attention_limits_scores_before_a_bias():
    options = {"position": lambda: AlibiPosition(heads=HEADS), "softcap": CAP, "head_width": WIDTH}
    inputs = [each.detach() for each in inputs_of()]
    found = FlexScoresCore(is_compiled=False, **options)(*inputs)
    torch.testing.assert_close(found, SoftmaxCore(**options)(*inputs))


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_flex_attention_passes_the_scale_on():
    options = {"pattern": lambda: LocalPattern(block=1, blocks_before=4), "scale": SCALE}
    inputs = [each.detach() for each in inputs_of()]
    torch.testing.assert_close(FlexCore(is_compiled=False, **options)(*inputs), DenseCore(**options)(*inputs))


def by_torch(core: FlexScoresCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's operators, which have a backward pass, compute what FlexAttention is called with."""

    def attend(query, key, value, *, score_mod, block_mask, enable_gqa, scale, return_aux):
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        batch, head, place, other = (
            torch.arange(size).view([-1 if one == dim else 1 for one in range(4)])
            for dim, size in enumerate(scores.shape)
        )
        scores = scores if score_mod is None else score_mod(scores, batch, head, place, other)
        scores = scores.masked_fill(~block_mask.mask_mod(batch, head, place, other), -math.inf)
        lse = scores.logsumexp(-1) if return_aux.lse else None
        return scores.softmax(-1) @ value, flex_attention.AuxOutput(lse=lse)

    monkeypatch.setattr(flex_attention, "flex_attention", attend)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("case", CASES)
def test_what_follows_flex_attention_has_the_gradients_of_the_formula(monkeypatch, case, documents):
    options, formula = CASES[case]
    core = filled(FlexScoresCore(is_compiled=False, head_width=WIDTH, **options))
    by_torch(core, monkeypatch)
    inputs = inputs_of()
    expected = written_out(*inputs, visible(documents=documents), sink=core.sinks, **formula)
    leaves = inputs if core.sinks is None else [*inputs, core.sinks]
    found = core.attend(*inputs, documents)
    assert_same_with_gradients(found, expected, leaves)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_new_token_over_stored_rows_is_the_last_of_the_formula(case, window):
    options, formula = CASES[case]
    pattern = None if window is None else lambda: LocalPattern(block=1, blocks_before=window)
    core = filled(SoftmaxCore(head_width=WIDTH, pattern=pattern, **options))
    query, key, value = inputs_of()
    expected = written_out(query, key, value, visible(window), sink=core.sinks, **formula)[7]
    # Rows after place 7 are stored, and hidden.
    span = Span(0, BATCH, LENGTH, torch.full((BATCH,), 7), is_even=False)
    rows = (each.permute(1, 2, 0, 3) for each in (key, value))
    torch.testing.assert_close(core.attend_stored(query[7], *rows, span), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinks_and_limits_are_computed_in_float32(dtype):
    """The gradient of a sink is a sum over tokens, which 16 bits would round at each of them."""
    core = filled(SoftmaxCore(head_width=WIDTH, softcap=CAP, sinks=HEADS)).to(dtype)
    inputs = [each.detach().to(dtype).requires_grad_() for each in inputs_of()]
    wide = [each.detach().double().requires_grad_() for each in (*inputs, core.sinks)]
    expected = written_out(*wide[:3], visible(), cap=CAP, sink=wide[3])
    found = core(*inputs)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)
    (of_sinks,) = torch.autograd.grad(found.float().square().sum(), [core.sinks])
    (of_wide,) = torch.autograd.grad(expected.square().sum(), [wide[3]])
    torch.testing.assert_close(of_sinks.double(), of_wide, rtol=0.03, atol=0.03)


def model_of(**settings: Any) -> nn.Module:
    """A model in float64 whose weights are large enough to show mistakes, also those initialized to 0."""
    model = build_model(*specs_from(settings), SINGLE_PROCESS, vocab_size=11)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    return model.double()


def tokens() -> Tensor:
    return torch.randint(0, 11, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("gate", ["none", "head", "element"])
def test_attention_with_wide_heads_and_a_gate_is_the_formula(gate):
    layer = model_of(**{**ALL, "pos_emb": "none", "attention_gate": gate}).stack[2].attention
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(LENGTH, BATCH, 24, generator=generator, dtype=torch.float64).requires_grad_()
    projected = (hidden @ layer.qkv.weight.T + layer.qkv.bias).view(LENGTH, BATCH, 2, 5, 6)
    query = projected[:, :, :, :3].flatten(2, 3)
    context = written_out(
        query,
        projected[:, :, :, 3],
        projected[:, :, :, 4],
        visible(),
        scale=SCALE,
        cap=CAP,
        sink=layer.core.sinks,
    )
    if gate != "none":
        logits = hidden @ layer.gate.weight.T
        context = context / (1 + (-logits.view(LENGTH, BATCH, 6, -1)).exp())
    expected = context.flatten(2) @ layer.dense.weight.T + layer.dense.bias
    shapes = {name: tuple(each.shape) for name, each in layer.named_parameters() if "bias" not in name}
    assert shapes == {
        "core.sinks": (6,),
        "qkv.weight": (60, 24),
        "dense.weight": (24, 36),
        **({} if gate == "none" else {"gate.weight": ({"head": 6, "element": 36}[gate], 24)}),
    }
    assert_same_with_gradients(layer(hidden)[0], expected, [hidden, *layer.parameters()])


def test_what_is_new_starts_without_effect_or_in_the_middle():
    model = build_model(*specs_from(ALL), SINGLE_PROCESS, vocab_size=11)
    attention = model.stack[1].attention
    assert torch.equal(attention.core.sinks, torch.zeros(6))
    assert attention.gate.bias is None
    assert attention.gate.weight.detach().std().item() == pytest.approx(0.3, rel=0.1)


def test_sinks_have_no_weight_decay():
    model = model_of(**ALL)
    decayed, plain = (group["params"] for group in split_by_weight_decay(model.parameters(), 0.1))
    attention = model.stack[1].attention
    assert any(each is attention.gate.weight for each in decayed)
    assert any(each is attention.core.sinks for each in plain)


def test_heads_need_not_divide_the_width():
    model = model_of(hidden_size=20, head_dim=8, num_attention_heads=6)
    assert model.stack[1].attention.dense.weight.shape == (20, 48)
    assert model(tokens()).isfinite().all()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("position", ["rotary", "alibi", "rpe", "none"])
@pytest.mark.parametrize("softmax", [False, True])
def test_logits_with_cached_rows_equal_a_full_forward(position, window, softmax):
    scaled = {"apply_query_key_layer_scaling": softmax}
    model = model_of(**ALL, pos_emb=position, sliding_window_width=window, **scaled).eval()
    with torch.no_grad():
        expected = model(tokens())
        found = logits_in_parts(model, tokens(), (0, 5, 9, 10, 11, 12))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["global", "local", "bigbird"])
def test_documents_equal_documents_alone(kind):
    layout = {"block": 1, "num_sliding_window_blocks": 3}
    settings = {"attention_config": [[[kind], "all"]], "sparsity_config": layout, "pos_emb": "none"}
    model = model_of(**ALL, **settings).eval()
    given, places = tokens(), torch.arange(LENGTH).expand(BATCH, LENGTH)
    logits = model((given, DOCUMENTS, places))
    changed = given.clone()
    changed[:, :3] = (changed[:, :3] + 1) % 11
    others = model((changed, DOCUMENTS, places))
    torch.testing.assert_close(others[0, 5:], logits[0, 5:])
    torch.testing.assert_close(others[1, 3:], logits[1, 3:])
    assert not torch.allclose(others[0, 3:5], logits[0, 3:5])
    if kind == "global":
        alone = model((given[:1, 5:], DOCUMENTS[:1, 5:], places[:1, 5:]))
        torch.testing.assert_close(alone[0], logits[0, 5:])

"""What each attention type and relative position computes, against formulas written out in full."""

import math
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

from neox_config.facts.attention import WITHOUT_HEADS
from neox_model.assembly.model import build_model
from neox_model.layers.attention import (
    BlockPattern,
    DenseCore,
    FlexCore,
    LocalPattern,
    SoftmaxCore,
    flex,
)
from neox_model.layers.attention.kv_cache import logits_in_parts
from neox_model.layers.positions import AlibiPosition, BucketPosition
from neox_model.layers.positions.relative import alibi_slopes, distance_buckets
from neox_model.parallel.groups import SINGLE_PROCESS, Group
from support.settings import specs_from

LENGTH, BATCH, HEADS, WIDTH = 12, 2, 6, 4
EACH = {"different_layout_per_head": True}

# attention_config type -> sparsity_config, each key of it once with another value than its default.
KINDS = {
    "global": [{}],
    "local": [
        {"block": 2},
        {"block": 3, "num_local_blocks": 2},
        {"block": 1, "num_sliding_window_blocks": 6},
    ],
    "sparse_fixed": [
        {"block": 2, "num_local_blocks": 2},
        {"block": 1, "num_local_blocks": 4, "num_global_blocks": 2, "mode": "dense"},
        {"block": 1, **EACH, "num_different_global_patterns": 4, "attention": "unidirectional"},
    ],
    "sparse_variable": [
        {"block": 2, "local_window_blocks": [1, 2]},
        {"block": 1, "local_window_blocks": [2], "global_block_indices": [3], "num_random_blocks": 1, **EACH},
        {"block": 1, "global_block_indices": [1, 6], "global_block_end_indices": [3, 7]},
    ],
    "bslongformer": [
        {"block": 2},
        {"block": 1, "num_sliding_window_blocks": 5, "global_block_indices": [4]},
        {"block": 2, "global_block_indices": [1], "global_block_end_indices": [3]},
    ],
    "bigbird": [
        {"block": 2, "num_random_blocks": 1},
        {"block": 1, "num_global_blocks": 2, "num_random_blocks": 2, **EACH},
        {"block": 1, "num_sliding_window_blocks": 5, "horizontal_global_attention": True},
    ],
    "gmlp": [{}],
    "amlp": [{}],
}
CASES = [(kind, sparsity) for kind, choices in KINDS.items() for sparsity in choices]
PATTERNED = [case for case in CASES if case[0] not in ("global", *WITHOUT_HEADS)]


def model_of(**settings) -> nn.Module:
    """Return a model whose weights are large enough to show mistakes, also those initialized to 0."""
    model = build_model(*specs_from(settings), SINGLE_PROCESS, vocab_size=11)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    return model


def of_kind(kind: str, sparsity: dict, **settings) -> nn.Module:
    return model_of(attention_config=[[[kind], "all"]], sparsity_config=sparsity, gmlp_attn_dim=8, **settings)


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 11, (BATCH, length), generator=torch.Generator().manual_seed(1))


def heads(count: int = HEADS, seed: int = 0, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, BATCH, count, WIDTH, generator=generator, requires_grad=True)


def written_out(query, key, value, visible_NST, bias_NST=0.0, coefficient=1.0) -> torch.Tensor:
    """Attention from its definition: context_SBNK."""
    scores = torch.einsum("sbnk,tbnk->bnst", query, key) / math.sqrt(WIDTH) + coefficient * bias_NST
    weights = scores.masked_fill(~visible_NST, -math.inf).softmax(dim=-1)
    return torch.einsum("bnst,tbnk->sbnk", weights, value)


def causal(length: int = LENGTH) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def assert_same_with_gradients(result, expected, inputs):
    torch.testing.assert_close(result, expected)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(9))
    mine = torch.autograd.grad((result * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("kind", "sparsity"), PATTERNED)
def test_sparse_attention_is_dense_attention_with_the_layout_as_mask(kind, sparsity):
    core = of_kind(kind, sparsity).stack[2].attention.core
    if kind == "local":
        assert isinstance(core.pattern, LocalPattern)
        block = torch.arange(LENGTH) // core.pattern.block
        visible = (block[:, None] - block[None, :] <= core.pattern.blocks_before)[None]
    else:
        assert isinstance(core.pattern, BlockPattern)
        side = sparsity["block"]
        visible = core.pattern.layout.repeat_interleave(side, 1).repeat_interleave(side, 2)
    visible = visible & causal()
    assert (visible != causal()).any()
    inputs = [heads(seed=seed) for seed in range(3)]
    assert_same_with_gradients(core(*inputs), written_out(*inputs, visible), inputs)


@pytest.mark.parametrize("width", [1, 4, 10])
def test_a_sliding_window_is_gpt_neox_mask(width):
    """A token sees itself and `width` tokens before it, as in GPT-NeoX's causal mask with a window."""
    core = model_of(sliding_window_width=width).stack[2].attention.core
    visible = causal() & torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(-width)
    assert visible[-1].sum() == width + 1
    inputs = [heads(seed=seed) for seed in range(3)]
    assert_same_with_gradients(core(*inputs), written_out(*inputs, visible[None]), inputs)


def test_a_window_as_long_as_the_samples_is_plain_attention():
    assert model_of(sliding_window_width=LENGTH - 1).stack[2].attention.core.pattern is None


def test_a_sliding_window_is_that_of_global_layers_only():
    sparsity = {"block": 2}
    core = of_kind("local", sparsity, sliding_window_width=1).stack[2].attention.core
    assert core.pattern.block == 2


@pytest.mark.parametrize("settings", [{}, {"apply_query_key_layer_scaling": True}])
def test_logits_of_a_sliding_window_with_cached_rows_equal_a_full_forward(settings):
    model = model_of(**settings, sliding_window_width=3, pos_emb="rotary").eval()
    given = tokens()
    with torch.no_grad():
        expected = model(given)
        found = logits_in_parts(model, given, (0, 5, 9, 10, 11, 12))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "blocks_before"),
    [({}, 2), ({"num_sliding_window_blocks": 3}, 1), ({"num_local_blocks": 7}, 3)],
)
def test_local_attention_reaches_half_its_window_back(settings, blocks_before):
    core = of_kind("local", {"block": 1, **settings}).stack[1].attention.core
    assert core.pattern.blocks_before == blocks_before


def test_heads_differ_only_with_different_layouts_per_head():
    shared = of_kind("bigbird", {"block": 1, "num_random_blocks": 2}).stack[1].attention.core.pattern
    each = of_kind("bigbird", {"block": 1, "num_random_blocks": 2, **EACH}).stack[1].attention.core.pattern
    assert (shared.num_masks, each.num_masks) == (1, HEADS)
    assert torch.equal(shared.layout[0], each.layout[0])
    assert not torch.equal(each.layout[0], each.layout[1])
    fixed = {"block": 1, "num_different_global_patterns": 2, **EACH}
    layout = of_kind("sparse_fixed", fixed).stack[1].attention.core.pattern.layout
    assert torch.equal(layout[0], layout[2])
    assert not torch.equal(layout[0], layout[1])


def test_random_blocks_differ_between_layers_and_seeds():
    def layouts(**settings):
        model = of_kind("bigbird", {"block": 1, "num_random_blocks": 1}, **settings)
        return [model.stack[place].attention.core.pattern.layout for place in (1, 2)]

    first, second = layouts()
    assert not torch.equal(first, second)
    assert torch.equal(first, layouts()[0])
    assert not torch.equal(first, layouts(seed=8)[0])


def test_buckets_equal_t5():
    # 8 buckets: 0-3 exact, then logarithmic up to 16.
    expected = [0, 1, 2, 3] + [min(7, 4 + int(math.log(n / 4) / math.log(4) * 4)) for n in range(4, 20)]
    assert distance_buckets(torch.arange(20), 8, 16).tolist() == expected
    assert expected[-1] == 7


def bucket_position(seed: int = 0) -> BucketPosition:
    position = BucketPosition(num_buckets=8, max_distance=10, heads=HEADS, head_width=WIDTH, init=None)
    generator = torch.Generator().manual_seed(seed)
    position.weight.data = torch.randn(8, HEADS, generator=generator)
    return position


def bias_written_out(position: BucketPosition) -> torch.Tensor:
    buckets = distance_buckets(torch.arange(LENGTH), 8, 10)
    rows = [
        [math.sqrt(WIDTH) * position.weight[buckets[max(0, q - k)]] for k in range(LENGTH)]
        for q in range(LENGTH)
    ]
    return torch.stack([torch.stack(row) for row in rows]).permute(2, 0, 1)


def test_relative_bias_is_added_to_the_scaled_scores():
    position = bucket_position()
    inputs = [heads(seed=seed) for seed in range(3)]
    result = DenseCore(position=lambda: position)(*inputs)
    expected = written_out(*inputs, causal(), bias_written_out(position))
    assert_same_with_gradients(result, expected, [*inputs, position.weight])


def test_layer_scaling_counts_a_relative_bias_as_often_as_it_scales():
    def softmax(scores, scale, masked_out):
        return (scores * scale).masked_fill(~causal(), -math.inf).softmax(-1)

    position = bucket_position()
    core = SoftmaxCore(softmax=softmax, head_width=WIDTH, coefficient=3.0, position=lambda: position)
    inputs = [heads(seed=seed) for seed in range(3)]
    expected = written_out(*inputs, causal(), bias_written_out(position), coefficient=3.0)
    assert_same_with_gradients(core(*inputs), expected, [*inputs, position.weight])


def test_alibi_slopes_are_the_authors():
    assert alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(6) == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]


def test_alibi_takes_slope_times_distance_from_the_score():
    inputs = [heads(seed=seed) for seed in range(3)]
    place = torch.arange(LENGTH)
    bias = -torch.tensor(alibi_slopes(HEADS))[:, None, None] * (place[:, None] - place[None, :])
    result = DenseCore(position=lambda: AlibiPosition(heads=HEADS))(*inputs)
    assert_same_with_gradients(result, written_out(*inputs, causal(), bias), inputs)


def test_each_rank_has_the_relative_bias_of_its_own_heads():
    second = Group(1, 2, None, (0, 1))
    alibi = AlibiPosition(heads=HEADS, group=second)(torch.arange(5))
    assert torch.equal(alibi, AlibiPosition(heads=HEADS)(torch.arange(5))[3:])
    position = BucketPosition(
        num_buckets=8, max_distance=10, heads=HEADS, head_width=WIDTH, init=None, group=second
    )
    assert position.weight.shape == (8, 3)
    assert position.weight.logical.slices == ((0, 8), (3, 6))


@pytest.mark.parametrize(
    "core",
    [
        DenseCore(),
        SoftmaxCore(
            softmax=lambda s, c, m: s.masked_fill(~causal() if m is None else m, -math.inf).softmax(-1),
            head_width=WIDTH,
        ),
    ],
)
def test_shared_keys_equal_repeated_keys(core):
    query, key, value = heads(), heads(2, seed=1), heads(2, seed=2)
    repeated = [x.repeat_interleave(3, dim=2) for x in (key, value)]
    assert_same_with_gradients(
        core(query, key, value), written_out(query, *repeated, causal()), [query, key, value]
    )


def documents() -> torch.Tensor:
    return torch.tensor([[0] * 5 + [1] * 7, [0, 1, 1] + [2] * 9])


FLEX = {
    "local": {"pattern": lambda: LocalPattern(block=2, blocks_before=1)},
    "layout for all": {
        "pattern": lambda: BlockPattern(num_blocks=12, block=1, layout=random_layout, heads=HEADS)
    },
    "layout for each": {
        "pattern": lambda: BlockPattern(
            num_blocks=6, block=2, layout=random_layout, heads=HEADS, is_per_head=True
        )
    },
    "rpe": {"position": bucket_position},
    "alibi, local": {
        "position": lambda: AlibiPosition(heads=HEADS),
        "pattern": lambda: LocalPattern(block=1, blocks_before=4),
    },
    "nothing": {},
}


def random_layout(num_blocks: int, head: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(head)
    drawn = torch.rand(num_blocks, num_blocks, generator=generator) > 0.5
    return (drawn | torch.eye(num_blocks, dtype=torch.bool)).tril()


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("case", FLEX)
def test_flex_attention_equals_dense_attention(case, shared, has_documents):
    flex, dense = FlexCore(is_compiled=False, **FLEX[case]), DenseCore(**FLEX[case])
    inputs = [heads().detach(), *(heads(HEADS // shared, seed=seed).detach() for seed in (1, 2))]
    given = documents() if has_documents else None
    with torch.no_grad():
        torch.testing.assert_close(flex(*inputs, given), dense(*inputs, given))


@pytest.mark.slow
def test_layers_of_a_kind_share_what_flex_attention_compiles(monkeypatch):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = cache(lambda function: torch.compile(function, dynamic=False, backend=count))
    monkeypatch.setattr(flex, "_compiled", compiled)
    options = {
        "position": lambda: AlibiPosition(heads=HEADS),
        "pattern": lambda: BlockPattern(num_blocks=6, block=2, layout=random_layout, heads=HEADS),
    }
    inputs = [heads(seed=seed).detach() for seed in range(3)]
    for _ in range(3):
        with torch.no_grad():
            result = FlexCore(**options)(*inputs, documents())
        torch.testing.assert_close(result, DenseCore(**options)(*inputs, documents()))
    # One makes block masks, one attends.
    assert len(graphs) == 2


def test_flex_attention_with_cached_keys_equals_dense_attention():
    options = {"pattern": lambda: LocalPattern(block=2, blocks_before=1)}
    inputs = [heads(length=3).detach(), heads(seed=1).detach(), heads(seed=2).detach()]
    result = FlexCore(**options)(*inputs)
    torch.testing.assert_close(result, DenseCore(**options)(*inputs))


@pytest.mark.parametrize(("kind", "sparsity"), CASES)
@pytest.mark.parametrize("position", ["learned", "rpe", "alibi"])
def test_attention_is_causal(kind, sparsity, position):
    model = of_kind(kind, sparsity, pos_emb=position).eval()
    given = tokens()[:1]
    # Row t has another token at place t.
    changed = (given + torch.eye(LENGTH, dtype=torch.long)) % 11
    logits, others = model(given)[0], model(changed)
    for place in range(LENGTH):
        torch.testing.assert_close(others[place, :place], logits[:place], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(others[place, place], logits[place], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("kind", "sparsity"), CASES)
@pytest.mark.parametrize("position", ["learned", "rpe"])
def test_a_shorter_window_is_the_beginning_of_a_whole_one(kind, sparsity, position):
    """As a curriculum cuts them: layouts and spatial matrices are used by their first part, at any length."""
    length = 7
    # In float64: the rounding of float32 sums depends on their length and on the processor.
    model = of_kind(kind, sparsity, pos_emb=position).double()
    weights = list(model.parameters())
    whole, cut = model(tokens())[:, :length], model(tokens()[:, :length])
    torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-9)
    expected = torch.autograd.grad(whole.square().sum(), weights, allow_unused=True)
    found = torch.autograd.grad(cut.square().sum(), weights, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kind", "sparsity"), CASES)
@pytest.mark.parametrize(
    "settings", [{"pos_emb": "rpe", "num_kv_heads": 2}, {"pos_emb": "alibi"}, {"pos_emb": "rotary"}]
)
def test_logits_with_cached_rows_equal_a_full_forward(kind, sparsity, settings):
    model = of_kind(kind, sparsity, **settings).eval()
    given = tokens()
    with torch.no_grad():
        expected = model(given)
        found = logits_in_parts(model, given, (0, 5, 9, 10, 11, 12))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model(given), expected)


@pytest.mark.parametrize(("kind", "sparsity"), CASES)
def test_documents_see_nothing_of_each_other(kind, sparsity):
    """A later document's logits are those that it has alone, behind another beginning."""
    model = of_kind(kind, sparsity).eval()
    given, ids = tokens(), documents()
    places = torch.arange(LENGTH).expand(BATCH, LENGTH)
    logits = model((given, ids, places))
    changed = given.clone()
    changed[:, :3] = (changed[:, :3] + 1) % 11
    others = model((changed, ids, places))
    torch.testing.assert_close(others[0, 5:], logits[0, 5:])
    torch.testing.assert_close(others[1, 3:], logits[1, 3:])
    assert not torch.allclose(others[0, 3:5], logits[0, 3:5])


@pytest.mark.parametrize("kind", ["gmlp", "amlp"])
@pytest.mark.parametrize("after_norm", [False, True])
def test_gmlp_layer_is_the_papers(kind, after_norm):
    settings = {"activation": "relu", "apply_residual_connection_post_layernorm": after_norm}
    layer = of_kind(kind, {}, **settings).stack[1].double()
    x = torch.randn(9, BATCH, 24, dtype=torch.float64)
    mlp, gate = layer.mlp, layer.mlp.gate
    normed = layer.norm1(x)
    u = torch.relu(normed @ mlp.up.weight.T + mlp.up.bias)
    v = torch.relu(normed @ mlp.up_gate.weight.T + mlp.up_gate.bias)
    mixed = torch.einsum("st,tbf->sbf", gate.weight.tril()[:9, :9], gate.norm(v)) + gate.bias[:9, None, None]
    assert gate.weight.shape == (LENGTH, LENGTH)
    if kind == "amlp":
        tiny = gate.attention
        projected = u @ tiny.from_u.weight.T + tiny.from_u.bias + v @ tiny.from_v.weight.T
        query, key, value = projected.chunk(3, dim=-1)
        scores = torch.einsum("sbk,tbk->bst", query, key) / math.sqrt(8)
        weights = scores.masked_fill(~causal(9), -math.inf).softmax(-1)
        mixed = mixed + torch.einsum("bst,tbk->sbk", weights, value) @ tiny.out.weight.T + tiny.out.bias
    else:
        assert gate.attention is None
    expected = (normed if after_norm else x) + (u * mixed) @ mlp.down.weight.T + mlp.down.bias
    torch.testing.assert_close(layer(x), expected)


def test_gmlp_starts_as_a_plain_mlp():
    model = build_model(*specs_from({"attention_config": [[["gmlp"], "all"]]}), SINGLE_PROCESS, vocab_size=11)
    gate = model.stack[1].mlp.gate
    assert torch.equal(gate.weight, torch.zeros(LENGTH, LENGTH))
    assert torch.equal(gate.bias, torch.ones(LENGTH))


def test_amlp_without_a_width_has_no_attention():
    model = build_model(
        *specs_from({"attention_config": [[["amlp"], "all"]], "gmlp_attn_dim": None}),
        SINGLE_PROCESS,
        vocab_size=11,
    )
    assert model.stack[1].mlp.gate.attention is None


def count_masks(monkeypatch) -> list[int]:
    """Sizes of batches for which block masks are made from now on."""
    made: list[int] = []
    usual = flex_attention.create_block_mask

    def counting(visible, batch, *sizes, **options):
        made.append(batch)
        return usual(visible, batch, *sizes, **options)

    monkeypatch.setattr(flex_attention, "create_block_mask", counting)
    return made


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_the_mask_of_documents_is_made_once_per_micro_batch_and_pattern(monkeypatch):
    made = count_masks(monkeypatch)
    masks = flex.DocumentMasks(2)
    patterns = [None, None, lambda: LocalPattern(block=1, blocks_before=4)] * 2
    cores = [FlexCore(is_compiled=False, pattern=pattern, masks=masks) for pattern in patterns]
    inputs = [heads(seed=seed).detach() for seed in range(3)]
    first, second = documents(), documents().flip(0).contiguous()
    with torch.no_grad():
        # The layers of two micro-batches, then those of the first again, with another view of its documents.
        for ids_BS in (first, second, first.detach()):
            for core in cores:
                expected = DenseCore(pattern=patterns[cores.index(core)])(*inputs, ids_BS)
                torch.testing.assert_close(core(*inputs, ids_BS), expected)
        assert len(made) == 4
        # A third micro-batch takes the place of the first.
        cores[0](*inputs, first.clone())
        cores[0](*inputs, second)
        assert len(made) == 5
        cores[0](*inputs, first)
    assert len(made) == 6


def test_recomputed_layers_find_the_masks_of_their_documents():
    """FlexAttention has no backward pass on a CPU: layers that only look up their masks stand for it."""
    masks, made = flex.DocumentMasks(), []

    def layer(hidden, ids_BS):
        masks.of(ids_BS, None, lambda: made.append(ids_BS))
        return hidden.exp()

    def layers(hidden, ids_BS):
        return layer(layer(hidden, ids_BS), ids_BS)

    calls = []
    usual, masks.of = masks.of, lambda *given: calls.append(given) or usual(*given)
    hidden = heads().detach().requires_grad_()
    checkpoint(layers, hidden, documents(), use_reentrant=False).sum().backward()
    assert (len(calls), len(made)) == (4, 1)

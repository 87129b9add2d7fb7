"""Attention in both directions: every core, pattern and position against formulas written out in full."""

import math

import pytest
import torch

from neox_model.extras.gmlp.layer import SpatialGate, TinyAttention
from neox_model.layers.attention import (
    BlockPattern,
    DenseCore,
    FlexCore,
    LocalPattern,
    SoftmaxCore,
    bigbird_layout,
    bslongformer_layout,
    fixed_layout,
    random_blocks,
    variable_layout,
)
from neox_model.layers.positions import AlibiPosition, BucketPosition
from neox_model.layers.positions.relative import alibi_slopes, distance_buckets

LENGTH, BATCH, HEADS, WIDTH = 12, 2, 6, 4


def heads(count: int = HEADS, seed: int = 0, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, BATCH, count, WIDTH, generator=generator, requires_grad=True)


def documents() -> torch.Tensor:
    # -1 is padding, which no other token sees.
    return torch.tensor([[0] * 5 + [1] * 7, [0, 1, 1] + [2] * 5 + [-1] * 4])


def bucket_position(*, both_ways: bool = True) -> BucketPosition:
    position = BucketPosition(
        num_buckets=8, max_distance=10, heads=HEADS, head_width=WIDTH, init=None, both_ways=both_ways
    )
    position.weight.data = torch.randn(8, HEADS, generator=torch.Generator().manual_seed(2))
    return position


def t5_bucket(relative: int) -> int:
    """The bucket of `key position - query position` in T5's encoder, with 8 buckets up to 10 tokens."""
    bucket = 4 if relative > 0 else 0
    distance = abs(relative)
    if distance < 2:
        return bucket + distance
    return bucket + min(3, 2 + int(math.log(distance / 2) / math.log(10 / 2) * 2))


def written_out_bias(position, distance_to_bias) -> torch.Tensor:
    rows = [[distance_to_bias(position, key - query) for key in range(LENGTH)] for query in range(LENGTH)]
    return torch.stack([torch.stack(row) for row in rows]).permute(2, 0, 1)


def of_buckets(position: BucketPosition, relative: int) -> torch.Tensor:
    return math.sqrt(WIDTH) * position.weight[t5_bucket(relative)]


def of_slopes(position: AlibiPosition, relative: int) -> torch.Tensor:
    return -torch.tensor(alibi_slopes(HEADS)) * abs(relative)


def any_layout(num_blocks: int, head: int) -> torch.Tensor:
    drawn = torch.rand(num_blocks, num_blocks, generator=torch.Generator().manual_seed(head)) > 0.5
    return drawn | torch.eye(num_blocks, dtype=torch.bool)


CASES = {
    "everything": {},
    "near on both sides": {"pattern": lambda: LocalPattern(block=1, blocks_before=2, both_ways=True)},
    "near blocks": {"pattern": lambda: LocalPattern(block=3, blocks_before=1, both_ways=True)},
    "layout of each head": {
        "pattern": lambda: BlockPattern(
            num_blocks=6, block=2, layout=any_layout, heads=HEADS, is_per_head=True
        )
    },
    "buckets": {"position": bucket_position},
    "slopes, near": {
        "position": lambda: AlibiPosition(heads=HEADS),
        "pattern": lambda: LocalPattern(block=1, blocks_before=4, both_ways=True),
    },
}


def expected(case: str, query, key, value, ids_BS) -> torch.Tensor:
    """Attention from its definition, token by token."""
    options = CASES[case]
    pattern = options["pattern"]() if "pattern" in options else None
    visible = torch.ones(BATCH, HEADS, LENGTH, LENGTH, dtype=torch.bool)
    for q in range(LENGTH):
        for k in range(LENGTH):
            for n in range(HEADS):
                if isinstance(pattern, LocalPattern):
                    near = abs(q // pattern.block - k // pattern.block) <= pattern.blocks_before
                    visible[:, n, q, k] &= near
                elif pattern is not None:
                    visible[:, n, q, k] &= bool(any_layout(6, n)[q // 2, k // 2])
                if ids_BS is not None:
                    visible[:, n, q, k] &= ids_BS[:, q] == ids_BS[:, k]
    bias = torch.zeros(())
    if "position" in options:
        position = options["position"]()
        bias = written_out_bias(position, of_slopes if "slopes" in case else of_buckets)
    scores = torch.einsum("sbnk,tbnk->bnst", query, key) / math.sqrt(WIDTH) + bias
    weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    return torch.einsum("bnst,tbnk->sbnk", weights, value)


def plain_softmax(scores, scale, masked_out):
    scores = scores * scale
    return (scores if masked_out is None else scores.masked_fill(masked_out, -math.inf)).softmax(-1)


CORES = {
    "dense": lambda options: DenseCore(is_causal=False, **options),
    "scores": lambda options: SoftmaxCore(
        softmax=plain_softmax, head_width=WIDTH, is_causal=False, **options
    ),
    "flex": lambda options: FlexCore(is_causal=False, is_compiled=False, **options),
}


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("core", CORES)
def test_every_core_computes_the_definition(core, case, has_documents):
    inputs = [heads(seed=seed) for seed in range(3)]
    ids_BS = documents() if has_documents else None
    module = CORES[core](CASES[case])
    if core == "flex":
        inputs = [one.detach() for one in inputs]
    result, wanted = module(*inputs, ids_BS), expected(case, *inputs, ids_BS)
    torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-5)
    if core != "flex":
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(9))
        mine = torch.autograd.grad((result * weights).sum(), inputs)
        theirs = torch.autograd.grad((wanted * weights).sum(), inputs)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("core", ["dense", "scores"])
def test_a_causal_core_is_found_by_this_comparison(core):
    inputs = [heads(seed=seed) for seed in range(3)]
    module = CORES[core]({})
    module.is_causal = True
    if core == "scores":
        module.softmax = lambda s, c, m: plain_softmax(s, c, torch.ones(LENGTH, LENGTH).triu(1).bool())
    assert not torch.allclose(module(*inputs), expected("everything", *inputs, None), atol=1e-2)


def test_buckets_are_those_of_encoders_or_of_decoders():
    distance = torch.arange(-LENGTH, LENGTH)
    both = distance_buckets(distance, 8, 10, both_ways=True).tolist()
    assert both == [t5_bucket(-one) for one in distance.tolist()]
    one_way = distance_buckets(distance, 8, 10).tolist()
    assert one_way[:LENGTH] == [0] * LENGTH
    assert one_way[LENGTH : LENGTH + 5] == [0, 1, 2, 3, 4]
    position = bucket_position(both_ways=False)
    found = DenseCore(is_causal=False, position=lambda: position).bias_of_scores(
        LENGTH, LENGTH, torch.device("cpu")
    )
    assert torch.equal(found[:, 3, 4], found[:, 3, 3])
    assert torch.equal(found[:, 3, 9], found[:, 3, 3])


def drawn(layout: torch.Tensor) -> list[str]:
    return ["".join("x" if seen else "." for seen in row) for row in layout.tolist()]


def nothing(row: int) -> list[int]:
    return []


def test_fixed_windows_are_seen_by_all_through_their_last_block():
    assert drawn(fixed_layout(6, local_blocks=3, global_blocks=1, is_causal=False)) == [
        "xxx..x",
        "xxx..x",
        "xxx..x",
        "..xxxx",
        "..xxxx",
        "..xxxx",
    ]


def test_horizontal_global_blocks_see_all():
    options = {"local_blocks": 3, "global_blocks": 1, "is_causal": False, "has_global_rows": True}
    assert drawn(fixed_layout(6, **options)) == ["xxx..x", "xxx..x", "xxxxxx", "..xxxx", "..xxxx", "xxxxxx"]
    options = {"windows": (1, 2), "global_ranges": [(3, 4)], "draw": nothing, "is_causal": False}
    assert drawn(variable_layout(5, **options)) == ["x..x.", ".xxx.", ".xxx.", "...xx", "...xx"]
    assert drawn(variable_layout(5, **options, has_global_rows=True))[3] == "xxxxx"


def test_bigbird_and_longformer_slide_to_both_sides():
    assert drawn(bigbird_layout(5, sliding_blocks=3, global_blocks=1, draw=nothing, is_causal=False)) == [
        "xxxxx",
        "xxx..",
        "xxxx.",
        "x.xxx",
        "x..xx",
    ]
    assert drawn(bslongformer_layout(5, sliding_blocks=3, global_ranges=[(4, 5)], is_causal=False)) == [
        "xx..x",
        "xxx.x",
        ".xxxx",
        "..xxx",
        "xxxxx",
    ]


def test_random_blocks_are_drawn_from_the_whole_sequence():
    draw = random_blocks(2, seed=1, layer=0, head=0, among=9)
    rows = [list(draw(row)) for row in range(9)]
    assert all(len(set(row)) == 2 for row in rows)
    assert {block for row in rows for block in row} - {0, 1} != set()
    assert any(max(found) > row for row, found in enumerate(rows))


@pytest.mark.parametrize("has_attention", [False, True])
@pytest.mark.parametrize("has_documents", [False, True])
def test_a_gate_mixes_all_positions(has_attention, has_documents):
    width, head = 8, 4

    def normal(tensor, generator):
        tensor.normal_(generator=generator)

    def attention():
        return TinyAttention(width, head, init=normal, output_init=normal, bias=False, is_causal=False)

    gate = SpatialGate(
        width,
        LENGTH,
        norm=lambda size: torch.nn.Identity(),
        attention=attention if has_attention else None,
        is_causal=False,
    )
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    u, v = (torch.randn(9, BATCH, width, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    ids_BS = documents()[:, 3:] if has_documents else None
    same = torch.ones(BATCH, 9, 9) if ids_BS is None else (ids_BS[:, :, None] == ids_BS[:, None]).float()
    mixed = torch.einsum("bst,st,tbf->sbf", same, gate.weight[:9, :9], v) + gate.bias[:9, None, None]
    if has_attention:
        tiny = gate.attention
        query, key, value = (u @ tiny.from_u.weight.T + v @ tiny.from_v.weight.T).chunk(3, dim=-1)
        scores = torch.einsum("sbk,tbk->bst", query, key) / math.sqrt(head)
        weights = scores.masked_fill(same == 0, -math.inf).softmax(-1)
        mixed = mixed + torch.einsum("bst,tbk->sbk", weights, value) @ tiny.out.weight.T
    torch.testing.assert_close(gate(u, v, ids_BS), u * mixed, atol=1e-4, rtol=1e-4)

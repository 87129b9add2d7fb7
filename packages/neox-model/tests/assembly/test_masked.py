"""Masked models as they are assembled: which tokens see which, by the settings of each kind of layer."""

import pytest
import torch
from torch import nn

from neox_model.assembly.model import build_model
from neox_model.layers.attention.dense import Core
from neox_model.parallel.groups import SINGLE_PROCESS
from support.settings import specs_from

LENGTH = 12
KINDS = {
    "global": {},
    "window": {"sliding_window_width": 2},
    "local": {"sparsity_config": {"block": 2, "num_local_blocks": 2}},
    "sparse_fixed": {"sparsity_config": {"block": 2, "num_local_blocks": 3}},
    "sparse_variable": {
        "sparsity_config": {"block": 2, "local_window_blocks": [1, 2], "num_random_blocks": 1}
    },
    "bslongformer": {"sparsity_config": {"block": 2}},
    "bigbird": {"sparsity_config": {"block": 2, "num_random_blocks": 1}},
    "gmlp": {},
    "amlp": {"gmlp_attn_dim": 8},
}
BLOCKS = [kind for kind, settings in KINDS.items() if "sparsity_config" in settings]


def model_of(**settings) -> nn.Module:
    """Return a model whose weights are large enough to show mistakes, also those initialized to 0."""
    settings = {"objective": "masked", "pos_emb": "none"} | settings
    model = build_model(*specs_from(settings), SINGLE_PROCESS, vocab_size=11)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    return model.eval()


def of_kind(kind: str, **settings) -> nn.Module:
    name = "global" if kind == "window" else kind
    return model_of(**{"attention_config": [[[name], "all"]], "num_layers": 1} | KINDS[kind] | settings)


def tokens() -> torch.Tensor:
    return torch.randint(0, 10, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def influence(model: nn.Module, ids: torch.Tensor | None = None) -> torch.Tensor:
    """True [changed token, token whose logits change]."""
    given = tokens()
    changed = (given + torch.eye(LENGTH, dtype=torch.long)) % 11

    def logits(rows: torch.Tensor) -> torch.Tensor:
        places = torch.arange(LENGTH).expand_as(rows)
        return model(rows if ids is None else (rows, ids.expand_as(rows).contiguous(), places))

    with torch.no_grad():
        difference = (logits(changed) - logits(given)).abs().amax(-1)
    return difference > 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_see_what_their_layer_shows_before_and_behind_them(kind):
    model = of_kind(kind)
    seen = influence(model).T
    assert seen.triu(1).any(), "no token sees a later one"
    assert seen.diagonal().all()
    if kind in ("global", "gmlp", "amlp"):
        expected = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    elif kind in ("window", "local"):
        side = 1 if kind == "window" else 2
        place = torch.arange(LENGTH) // side
        expected = (place[:, None] - place).abs() <= (2 if kind == "window" else 1)
    else:
        layout = model.stack[1].attention.core.pattern.layout[0]
        expected = layout.repeat_interleave(2, 0).repeat_interleave(2, 1)
        assert not expected.all()
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("kind", BLOCKS)
def test_unidirectional_layers_of_masked_models_are_those_of_causal_ones(kind):
    sparsity = KINDS[kind]["sparsity_config"]
    kinds = {"attention_config": [kind, "global"], "num_layers": 2}
    one_way = of_kind(kind, **kinds, sparsity_config={**sparsity, "attention": "unidirectional"}).stack[1]
    causal = of_kind(kind, **kinds, objective="causal").stack[1]
    cores = [layer.attention.core for layer in (one_way, causal)]
    assert [core.is_causal for core in cores] == [True, True]
    assert cores[0].pattern.key == cores[1].pattern.key
    inputs = [torch.randn(LENGTH, 1, 6, 4, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    torch.testing.assert_close(cores[0](*inputs), cores[1](*inputs))
    assert not of_kind(kind, **kinds).stack[1].attention.core.is_causal


@pytest.mark.parametrize("kind", ["sparse_fixed", "sparse_variable"])
def test_horizontal_global_attention_lets_global_blocks_see_all(kind):
    sparsity = {**KINDS[kind]["sparsity_config"], "num_random_blocks": 0}
    without = of_kind(kind, sparsity_config=sparsity)
    having = of_kind(kind, sparsity_config={**sparsity, "horizontal_global_attention": True})
    one, other = (model.stack[1].attention.core.pattern.layout[0] for model in (without, having))
    assert torch.equal(one & other, one)
    rows = other.all(dim=1) & ~one.all(dim=1)
    assert rows.any()
    assert torch.equal(other[~rows], one[~rows])


def test_relative_positions_know_the_direction():
    distances = torch.arange(-5, 6)
    settings = {"pos_emb": "rpe", "rpe_num_buckets": 8, "rpe_max_distance": 10}
    both = of_kind("global", **settings).stack[1].attention.core.position(distances)
    assert not torch.allclose(both[:, :5], both[:, 6:].flip(1))
    decoder = of_kind("global", **settings, rpe_causal=True).stack[1].attention.core.position(distances)
    assert torch.equal(decoder[:, :6], decoder[:, 5:6].expand(-1, 6))
    alibi = of_kind("global", pos_emb="alibi").stack[1].attention.core.position(distances)
    assert torch.equal(alibi[:, :5], alibi[:, 6:].flip(1))


@pytest.mark.parametrize("kind", KINDS)
def test_documents_and_padding_are_not_seen(kind):
    ids = torch.tensor([0] * 4 + [1] * 5 + [-1] * 3)
    seen = influence(of_kind(kind), ids).T
    same = ids[:, None] == ids
    assert not (seen & ~same).any()
    assert seen[same].any()


@pytest.mark.parametrize(
    "computed",
    [{"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}, {"onnx_safe": True}],
)
@pytest.mark.parametrize("kind", ["global", "bigbird"])
def test_stored_scores_give_the_same_logits(kind, computed):
    plain, stored = of_kind(kind, num_layers=3), of_kind(kind, num_layers=3, **computed)
    assert {type(module).__name__ for module in stored.modules() if isinstance(module, Core)} == {
        "SoftmaxCore"
    }
    ids = torch.tensor([[0] * 4 + [1] * 5 + [-1] * 3])
    places = torch.arange(LENGTH)[None]
    with torch.no_grad():
        torch.testing.assert_close(stored(tokens()), plain(tokens()), atol=1e-4, rtol=1e-4)
        given = (tokens(), ids, places)
        torch.testing.assert_close(stored(given), plain(given), atol=1e-4, rtol=1e-4)

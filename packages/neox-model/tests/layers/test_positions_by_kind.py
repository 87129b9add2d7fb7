"""Layers that differ in their windows and rotary embeddings, against formulas in float64."""

import math

import pytest
import torch

from neox_config.facts.rotary import longrope_attention_factor
from neox_model.assembly.model import build_model
from neox_model.layers.attention.kv_cache import logits_in_parts
from neox_model.layers.positions import LearnedPosition, RotaryPosition, lengths_of_requests
from neox_model.parallel.groups import SINGLE_PROCESS
from support.settings import specs_from

LENGTH, BATCH, HEADS, WIDTH = 12, 2, 6, 4
ORIGINAL, SHORT, LONG = 8, [0.5], [3.0]
NAMES = ["sliding", "full", "nope", "long", "global"]
MIXED = {
    "num_layers": 5,
    "pos_emb": "rotary",
    "rotary_pct": 0.5,
    "rotary_emb_base": 50,
    "attention_config": NAMES,
    "attention_kinds": {
        "sliding": {"sliding_window_width": 3, "rotary_emb_base": 7},
        "full": {"rotary_scaling": {"type": "linear", "factor": 8.0}},
        "nope": {"pos_emb": "none", "sliding_window_width": 6},
        "long": {
            "rotary_scaling": {
                "type": "longrope",
                "original_max_position_embeddings": ORIGINAL,
                "short_factor": SHORT,
                "long_factor": LONG,
            }
        },
    },
}
# Name -> tokens seen before a token; frequency of the only rotated pair; what multiplies sines and cosines.
FACTOR = math.sqrt(1 + math.log(LENGTH / ORIGINAL) / math.log(ORIGINAL))
EXPECTED = {
    "sliding": (3, 1.0, 1.0),
    "full": (LENGTH, 1 / 8, 1.0),
    "nope": (6, 0.0, 1.0),
    "long": (LENGTH, 1 / LONG[0], FACTOR),
    "global": (LENGTH, 1.0, 1.0),
}


def model_of(**settings):
    """A model in float64 whose weights are large enough to show mistakes."""
    model = build_model(*specs_from(MIXED | settings), SINGLE_PROCESS, vocab_size=11).double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    return model


def attentions(model):
    return dict(zip(NAMES, (model.stack[1 + index].attention for index in range(len(NAMES))), strict=True))


def written_out(projected_SBX, documents_BS, before, frequency, factor):
    """Context [S, B, heads x width] of a projection, from the definition."""
    length, batch = projected_SBX.shape[:2]
    query, key, value = projected_SBX.view(length, batch, HEADS, 3, WIDTH).unbind(3)
    angle = torch.arange(length, dtype=torch.float64) * frequency
    cosine, sine = angle.cos()[:, None, None] * factor, angle.sin()[:, None, None] * factor

    def turned(x):
        first, second = x[..., 0], x[..., 1]
        pair = (first * cosine - second * sine, second * cosine + first * sine)
        return torch.cat((torch.stack(pair, dim=-1), x[..., 2:]), dim=-1)

    scores = torch.einsum("sbnk,tbnk->bnst", turned(query), turned(key)) / math.sqrt(WIDTH)
    place = torch.arange(length)
    distance = place[:, None] - place
    visible = ((distance >= 0) & (distance <= before)).expand(batch, 1, -1, -1)
    if documents_BS is not None:
        visible = visible & (documents_BS[:, :, None] == documents_BS[:, None, :])[:, None]
    weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    return torch.einsum("bnst,tbnk->sbnk", weights, value).flatten(2)


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_each_kind_is_its_formula(name, has_documents):
    attention = attentions(model_of())[name]
    hidden = torch.randn(LENGTH, BATCH, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] + [1] * 11]) if has_documents else None
    projected, _ = attention.qkv(hidden)
    context = written_out(projected, documents, *EXPECTED[name])
    expected, _ = attention.dense(context)
    found, _ = attention(hidden, documents)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_layers_with_the_same_rotation_share_their_tables():
    layers = attentions(model_of(attention_config=["sliding", "full", "nope", "long", "sliding"]))
    tables = [layer.position and layer.position._tables for layer in layers.values()]
    assert tables[0] is tables[4]
    assert tables[2] is None
    assert len({id(each) for each in tables}) == 4


@pytest.mark.parametrize("seq_length", [LENGTH, ORIGINAL])
def test_training_chooses_the_factors_of_its_sequences(seq_length):
    model = model_of(seq_length=seq_length)
    position = attentions(model)["long"].position
    cosines, _ = position.tables(2, torch.device("cpu"), torch.float64)
    factors = LONG if seq_length > ORIGINAL else SHORT
    expected = math.cos(1 / factors[0]) * longrope_attention_factor(LENGTH, ORIGINAL)
    assert float(cosines[1]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("length", [LENGTH, ORIGINAL])
def test_a_mixed_model_with_a_cache_is_the_one_without(length):
    model = model_of()
    tokens = torch.randint(0, 11, (BATCH, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), lengths_of_requests(model, torch.full((BATCH,), length)):
        expected = model(tokens)
    found = logits_in_parts(model, tokens, (0, 6, 7, *range(8, length + 1)))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    if length == LENGTH:  # The length of training, too.
        with torch.no_grad():
            torch.testing.assert_close(model(tokens), expected, atol=1e-6, rtol=1e-6)


def test_each_sequence_has_the_factors_of_its_own_request():
    model = model_of()
    tokens = torch.randint(0, 11, (3, ORIGINAL), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([ORIGINAL, ORIGINAL + 1, 3])
    with torch.no_grad(), lengths_of_requests(model, lengths):
        together = model(tokens)
    for row, length in enumerate(lengths):
        with torch.no_grad(), lengths_of_requests(model, length.view(1)):
            torch.testing.assert_close(model(tokens[row : row + 1])[0], together[row])
    with torch.no_grad():  # Long sequences, as in training.
        plain = model(tokens)
    assert torch.allclose(plain[1], together[1], atol=1e-6)
    assert not torch.allclose(plain[0], together[0], atol=1e-3)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("settings", [{}, {"attention_factor": 1.25}])
def test_longrope_tables_are_those_of_transformers_to_the_last_bit(settings, fraction):
    """Also where part of the channels is rotated, and on both sides of the original length."""
    transformers = pytest.importorskip("transformers")
    pairs = int(32 * fraction) // 2
    factors = {
        "short_factor": [1 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5**i for i in range(pairs)],
    }
    shared = {"original_max_position_embeddings": 64, **factors, **settings}
    config = transformers.Phi3Config(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": fraction, **shared,
        },
    )  # fmt: skip
    theirs = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding(config)
    resolved, _ = specs_from(
        {
            "hidden_size": 64,
            "num_attention_heads": 2,
            "pos_emb": "rotary",
            "rotary_pct": fraction,
            "rotary_emb_base": 500,
            "rotary_scaling": {"type": "longrope", **shared},
            "max_position_embeddings": 256,
        }
    )
    scaling = dict(resolved.layers[0].mixer.position.scaling)
    for length in (64, 65, 256):
        position = RotaryPosition(head_width=32, fraction=fraction, base=500, scaling=scaling, length=length)
        cosines, sines = position.tables(length, torch.device("cpu"), torch.float32)
        expected = theirs(torch.zeros(1, length, 1), torch.arange(length).unsqueeze(0))
        assert torch.equal(cosines, expected[0][0, :, :pairs])
        assert torch.equal(sines, expected[1][0, :, :pairs])


def test_learned_positions_are_rows_behind_the_offset():
    """OPT looks position 0 up at row 2."""
    spec, _ = specs_from({"opt_pos_emb_offset": 2})
    added = spec.embedding.position
    assert (added.offset, added.rows) == (2, LENGTH + 2)
    position = LearnedPosition(4, 3, init=lambda weight, *_: weight, offset=2)
    with torch.no_grad():
        position.weight.copy_(torch.arange(18.0).view(6, 3))
    assert position(torch.tensor([[0], [3]])).flatten().tolist() == [6, 7, 8, 15, 16, 17]

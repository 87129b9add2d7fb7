"""Notes on widths: which parameter, with which value, and none where every dimension is aligned."""

import json
import re
from dataclasses import replace

import pytest

from neox_config import NeoXConfig, Text, load_config, resolve
from neox_config.catalogue import find_model, model_names
from neox_config.estimate.parameters import Weights, each_tensor
from neox_config.estimate.setup import setup_of
from neox_config.estimate.widths import notes_on_widths
from neox_config.problems import Problem
from neox_config.spec.model import Attention, ModelSpec
from neox_config.spec.resume import flat_values

WIDE = ("precision=bfloat16", "hidden-size=2048", "num-attention-heads=16")
GMLP = 'attention-config=[[["gmlp"], "all"]]'
AMLP = 'attention-config=[[["amlp"], "all"]]'
TRAINING = """
precision: bfloat16
train-iters: 1
train-micro-batch-size-per-gpu: 1
optimizer: {type: Adam, params: {lr: 0.001}}
"""
ICT = ("objective=ict", "no-weight-tying=true", "ict-head-size=100")


def noted(config: NeoXConfig, vocab_size: int | None = None) -> list[Problem]:
    resolved = resolve(config, devices=config.parallelism.model_parallel_size)
    return notes_on_widths(resolved, vocab_size=vocab_size)


def short(notes: list[Problem]) -> list[tuple[str, str, str]]:
    """Return what differs between the notes."""
    found = []
    for note in notes:
        gives, reason = note.what.split("; ")
        assert reason == "products in 16 bits are slow unless widths are multiples of 8"
        found.append((f"{note.name}: {note.value}", gives, note.remedy))
    return found


@pytest.mark.parametrize(
    ("settings", "vocab_size", "expected"),
    [
        (
            ["activation=swiglu"],
            None,
            (
                "hidden_size: 2048",
                "gives an MLP width of 5,461 with activation: swiglu",
                "set mlp-width: 5504",
            ),
        ),
        (
            ["mlp-width=11000", "model-parallel-size=2"],
            None,
            (
                "mlp_width: 11000",
                "gives an MLP width of 11,000 with activation: gelu, 5,500 on each of 2 tensor-parallel "
                "ranks",
                "set mlp-width: 11008",
            ),
        ),
        (
            ["intermediate-size=1000", "model-parallel-size=2"],
            None,
            (
                "intermediate_size: 1000",
                "gives an MLP width of 1,000 with activation: gelu, 500 on each of 2 tensor-parallel ranks",
                "set mlp-width: 1024 instead of intermediate-size",
            ),
        ),
        (
            ["hidden-size=2000"],
            None,
            (
                "num_attention_heads: 16",
                "gives heads of width 125 with hidden-size: 2000",
                "set hidden-size: 2048, or another num-attention-heads",
            ),
        ),
        (
            ["make-vocab-size-divisible-by=1"],
            50_257,
            (
                "make_vocab_size_divisible_by: 1",
                "gives a vocabulary of 50,257 entries",
                "set make-vocab-size-divisible-by: 64",
            ),
        ),
        (
            ["make-vocab-size-divisible-by=8", "model-parallel-size=4"],
            50_257,
            (
                "make_vocab_size_divisible_by: 8",
                "gives a vocabulary of 50,264 entries, 12,566 on each of 4 tensor-parallel ranks",
                "set make-vocab-size-divisible-by: 256",
            ),
        ),
        (
            ["lora-rank=4", "lora-base=checkpoints"],
            None,
            ("lora_rank: 4", "is the width of the matrices of adapters", "set lora-rank: 8"),
        ),
        (
            [GMLP, "pos-emb=none", "hidden-size=2000"],
            None,
            None,
        ),
        (
            [GMLP, "pos-emb=none", "hidden-size=48", "num-attention-heads=16", "model-parallel-size=16"],
            None,
            ("hidden_size: 48", "is the width of all matrices", "set hidden-size: 128"),
        ),
        (
            [GMLP, "pos-emb=none", "seq-length=30"],
            None,
            ("seq_length: 30", "is the width of the matrices over positions", "set seq-length: 24"),
        ),
        (
            [AMLP, "pos-emb=none", "gmlp-attn-dim=60"],
            None,
            (
                "gmlp_attn_dim: 60",
                "is the width of the attention head of amlp layers",
                "set gmlp-attn-dim: 64",
            ),
        ),
        (
            ["pos-emb=rpe", "seq-length=30"],
            None,
            ("seq_length: 30", "is the width of attention scores", "set seq-length: 24"),
        ),
        (
            [*ICT, "model-parallel-size=2"],
            1001,
            (
                "ict_head_size: 100",
                "is the width of the embeddings, 50 on each of 2 tensor-parallel ranks",
                "set ict-head-size: 112",
            ),
        ),
    ],
)
def test_the_parameter_behind_a_slow_width_is_noted_with_its_next_good_value(
    load, settings, vocab_size, expected
):
    found = short(noted(load("", *WIDE, *settings), vocab_size))
    assert found == ([] if expected is None else [expected])
    assert noted(load("", *WIDE, *settings, "precision=fp32"), vocab_size) == []


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, []),
        (4, [("hidden_size: 2064", "is the width of all matrices", "set hidden-size: 2176")]),
    ],
)
def test_the_width_of_another_mixer_is_that_of_the_layers(load, ranks, expected):
    settings = ("hidden-size=2064", "mlp-width=8192", f"model-parallel-size={ranks}")
    resolved = resolve(load("", *WIDE, *settings), devices=ranks)
    # Of no class that the notes know.
    layers = tuple(replace(layer, mixer=object()) for layer in resolved.model.layers)
    other = replace(resolved, model=replace(resolved.model, layers=layers))
    assert short(notes_on_widths(other, vocab_size=None)) == expected


def test_several_slow_widths_are_noted_once_each(load):
    settings = ("activation=swiglu", "hidden-size=2000", "make-vocab-size-divisible-by=1")
    config = load("", *WIDE, *settings)
    names = [note.name for note in noted(config, 50_257)]
    assert names == ["num_attention_heads", "hidden_size", "make_vocab_size_divisible_by"]


def test_an_unknown_vocabulary_is_not_noted(load):
    assert noted(load("", *WIDE, "make-vocab-size-divisible-by=1"), None) == []


@pytest.mark.parametrize(
    "settings",
    [
        ["finetune=true", "load=checkpoints"],
        ["lora-rank=8", "lora-base=checkpoints"],
    ],
)
def test_widths_of_weights_to_load_are_not_noted(load, settings):
    slow = (*WIDE, "hidden-size=2000", "activation=swiglu", "make-vocab-size-divisible-by=1")
    assert len(noted(load("", *slow), 50_257)) == 3
    assert noted(load("", *slow, *settings), 50_257) == []


def test_widths_of_a_training_that_continues_are_not_noted(load, tmp_path):
    config = load("", *WIDE, "hidden-size=2000", f"load={tmp_path}", f"save={tmp_path}", "save-interval=5")
    assert [note.name for note in noted(config)] == ["num_attention_heads"]
    saved = tmp_path / "global_step5"
    saved.mkdir()
    manifest = {"contents": {"config": flat_values(config)}}
    (saved / "manifest.json").write_text(json.dumps(manifest))
    assert noted(config) == []


def dimensions(model: ModelSpec, ranks: int, tensors: list[Weights]) -> set[int]:
    """Return the dimensions of one rank's matrices that multiply tokens, and the width of a head."""
    found = {number for tensor in tensors for number in tensor.local_shape(ranks) if number is not None}
    mixers = (layer.mixer for layer in model.layers)
    return found | {mixer.head_width for mixer in mixers if isinstance(mixer, Attention)}


SHAPES = [
    {"hidden-size": hidden, "num-attention-heads": heads} | block | attention
    for hidden in (96, 128, 168, 200)
    for heads in (4, 8)
    for block in ({}, {"activation": "swiglu", "mlp-width": 500}, {"activation": "swiglu", "mlp-width": 512})
    for attention in (
        {},
        {"num-kv-heads": 4},
        {"attention-config": '[[["amlp"], "all"]]', "pos-emb": "none"},
    )
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_there_is_a_note_exactly_where_the_estimate_has_a_matrix_with_a_slow_dimension(load, ranks):
    with_notes = 0
    for sizes in SHAPES:
        settings = [f"{name}={value}" for name, value in sizes.items()]
        settings += ["precision=bfloat16", f"model-parallel-size={ranks}", "no-weight-tying=true"]
        for vocab_size in (1024, 1025):
            config = load("", *settings, "make-vocab-size-divisible-by=1")
            resolved = resolve(config, devices=ranks)
            setup = setup_of(resolved, vocab_size=vocab_size)
            tensors = [each for each in each_tensor(setup) if each.multiplies]
            is_slow = any(number % 8 for number in dimensions(setup.model, ranks, tensors))
            notes = notes_on_widths(resolved, vocab_size=vocab_size)
            assert bool(notes) == is_slow, (sizes, vocab_size, notes)
            with_notes += bool(notes)
    assert 0 < with_notes < 2 * len(SHAPES)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_following_the_notes_leaves_none(load, ranks):
    for sizes in SHAPES:
        given = {**sizes, "make-vocab-size-divisible-by": 1}
        settings = ["precision=bfloat16", f"model-parallel-size={ranks}"]
        for _ in range(3):
            config = load("", *settings, *(f"{name}={value}" for name, value in given.items()))
            notes = noted(config, 1025)
            given |= dict(re.findall(r"set ([a-z-]+): ([0-9]+)", " ".join(note.remedy for note in notes)))
        assert notes == [], sizes


@pytest.mark.parametrize("name", model_names())
def test_only_a_vocabulary_without_padding_is_noted_of_published_models(name):
    model = find_model(name)
    texts = (Text(model.text, name), Text(TRAINING, "training"))
    notes = noted(load_config([], texts=texts), model.published.rows)
    without = name.startswith(("gpt2", "olmo-3"))
    assert [note.name for note in notes] == (["make_vocab_size_divisible_by"] if without else [])

"""Schedules of compression, and which matrices belong to which group."""

import pytest

from neox_config.extras.compression.facts import bits_at, block_of, density_at, is_n_of_m, quantized_share
from neox_config.extras.compression.matrices import (
    compressed_matrices,
    compressible_matrices,
    matching,
    matrix_shape,
)
from neox_config.facts.attention import ATTENTION_FACTS, AttentionFacts


def test_bits_fall_by_one_every_period_to_the_target():
    found = [bits_at(iteration, offset=3, start=8, target=5, period=4) for iteration in range(20)]
    assert found == [None] * 3 + [8] * 4 + [7] * 4 + [6] * 4 + [5] * 5


def test_the_share_of_quantized_values_grows_to_1():
    assert [quantized_share(since, 0.4) for since in range(4)] == pytest.approx([0.4, 0.8, 1.0, 1.0])


def test_the_density_falls_exponentially_in_steps_from_the_offset_to_the_end():
    found = {
        iteration: density_at(iteration, start=10, end=25, stride=5, target=0.1) for iteration in range(40)
    }
    changes = {iteration: density for iteration, density in found.items() if density is not None}
    assert list(changes) == [10, 15, 20, 25]
    assert list(changes.values()) == pytest.approx([0.1**0.25, 0.1**0.5, 0.1**0.75, 0.1])
    assert density_at(7, start=7, end=7, stride=3, target=0.3) == pytest.approx(0.3)
    uneven = [density_at(iteration, start=0, end=5, stride=4, target=0.2) for iteration in (4, 8, 12)]
    assert uneven == [pytest.approx(0.2 ** (2 / 3)), pytest.approx(0.2), None]


def test_patterns_of_weights():
    assert block_of("4x1") == (4, 1)
    assert block_of("2:4") == (2, 4)
    assert is_n_of_m("2:4")
    assert not is_n_of_m("4x1")


def test_matrices_are_those_of_the_layers(load):
    assert compressible_matrices(load())[:4] == [
        "layers.0.attention.qkv",
        "layers.0.attention.dense",
        "layers.0.mlp.up",
        "layers.0.mlp.down",
    ]
    assert "layers.0.mlp.gate" in compressible_matrices(load("activation: swiglu"))


@pytest.mark.parametrize(("gate", "outputs"), [("head", 4), ("element", 20)])
def test_the_gate_of_attention_is_a_matrix_of_the_layers(load, gate, outputs):
    config = load(f"attention-gate: {gate}\nhead-dim: 5")
    assert compressible_matrices(config)[:3] == [
        "layers.0.attention.qkv",
        "layers.0.attention.gate",
        "layers.0.attention.dense",
    ]
    assert matrix_shape(config, "layers.0.attention.gate") == (outputs, 64)


def test_a_layer_without_heads_has_only_the_matrices_of_its_mlp(load, monkeypatch):
    monkeypatch.setitem(ATTENTION_FACTS, "local", AttentionFacts(has_heads=False))
    found = compressible_matrices(load("attention-config: [[[local, global], all]]"))
    assert found[:4] == [
        "layers.0.mlp.up",
        "layers.0.mlp.down",
        "layers.1.attention.qkv",
        "layers.1.attention.dense",
    ]


def test_patterns_are_searched_in_names():
    names = ["layers.1.mlp.up", "layers.10.mlp.up", "layers.1.attention.qkv"]
    assert matching(["mlp"], names) == names[:2]
    assert matching([r"layers\.1\."], names) == [names[0], names[2]]
    assert matching(["*"], names) == names
    assert matching([], names) == []


def test_each_matrix_has_its_group_of_each_part(load):
    config = load(
        "compression_training:\n"
        "  weight_quantization:\n"
        "    shared_parameters: {enabled: true, quantize_weight_in_forward: true}\n"
        "    different_groups:\n"
        "      a: {params: {start_bits: 8, target_bits: 8}, modules: [attention]}\n"
        "      b: {params: {start_bits: 4, target_bits: 4}, modules: [mlp.up]}\n"
        "  sparse_pruning:\n"
        "    shared_parameters: {enabled: true, method: snip_momentum, excluded_modules: [mlp]}\n"
    )
    found = {
        name: {part: key for part, (key, _) in parts.items()}
        for name, parts in compressed_matrices(
            config.compression.compression_training, compressible_matrices(config)
        ).items()
        if name.startswith("layers.0.")
    }
    assert found == {
        "layers.0.attention.qkv": {"weight_quantization": "a", "sparse_pruning": ""},
        "layers.0.attention.dense": {"weight_quantization": "a", "sparse_pruning": ""},
        "layers.0.mlp.up": {"weight_quantization": "b"},
    }

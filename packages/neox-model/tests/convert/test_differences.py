"""Models are compared in their simplest form, and what differs is named by our parameters."""

import pytest

from neox_model.convert.differences import differences, mixers
from support.settings import resolved_from

LOCAL = {"attention_config": [[["local"], "all"]], "sparsity_config": {"block": 1, "num_local_blocks": 8}}


def found(ours, theirs):
    one, other = (resolved_from(settings).model for settings in (ours, theirs))
    return differences(one, other)


# Sequences have 12 tokens: a token and 11 before it.
@pytest.mark.parametrize(("before", "hides"), [(10, True), (11, False), (12, False)])
@pytest.mark.parametrize("is_local", [True, False])
def test_a_window_that_covers_every_sequence_is_none(before, hides, is_local):
    settings = {"sliding_window_width": before}
    if is_local:
        settings = LOCAL | {"sparsity_config": {"block": 1, "num_local_blocks": 2 * before}}
    expected = ["pattern (sliding-window-width, attention-config): window (there: none)"] if hides else []
    assert found(settings, {}) == expected
    assert [each.pattern is not None for each in mixers(resolved_from(settings).model)] == [hides] * 3


def test_one_window_has_two_types_of_attention():
    assert found(LOCAL, {"sliding_window_width": 4}) == []
    assert found(LOCAL, {"sliding_window_width": 5}) == [
        "before (sliding-window-width, sparsity-config.num-local-blocks): 4 (there: 5)"
    ]


def test_blocks_of_several_tokens_are_no_window_of_tokens():
    blocks = LOCAL | {"sparsity_config": {"block": 4, "num_local_blocks": 4}}
    assert found(blocks, {"sliding_window_width": 2}) == ["sparsity-config.block: 4 (there: 1)"]


def test_the_padding_of_the_vocabulary_is_not_compared():
    assert found({"make_vocab_size_divisible_by": 64}, {}) == []


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"no_weight_tying": True}, "tied (no-weight-tying): false (there: true)"),
        ({"norm": "scalenorm"}, "norm: scalenorm (there: layernorm)"),
        ({"pos_emb": "rotary"}, "pos-emb: rotary (there: learned)"),
        ({"gpt_j_residual": True}, "gpt-j-residual: parallel (there: serial)"),
        ({"norm_placement": "both"}, "norm-placement: both (there: before)"),
        ({"norm_zero_centered": True}, "norm-zero-centered: true (there: false)"),
        ({"qk_norm": "head"}, "qk-norm: head (there: none)"),
        ({"mlp_width": 20}, "mlp-width: 20 (there: 96)"),
        ({"num_kv_heads": 2}, "num-kv-heads: 2 (there: 6)"),
        ({"num_layers": 2}, "num-layers: 2 (there: 3)"),
        (
            {"layernorm_epsilon": 1e-3},
            "epsilon (layernorm-epsilon, rms-norm-epsilon, scalenorm-epsilon): 0.001 (there: 1e-05)",
        ),
        (
            {"num_unique_layers": 1},
            "owner (num-unique-layers, param-sharing-style): 0 (there: none)",
        ),
        ({"attention_config": [[["gmlp"], "all"]]}, "attention-config: gmlp (there: global)"),
        (
            {"attention_config": ["global", "gmlp", "global"]},
            "attention-config: global, gmlp (there: global)",
        ),
    ],
)
def test_an_option_is_named_with_both_values(settings, option):
    assert option in found(settings, {})


def test_settings_of_scaled_frequencies_are_named():
    scaled = {"pos_emb": "rotary", "rotary_scaling": {"type": "linear", "factor": 2.0}}
    assert found(scaled, {"pos_emb": "rotary"}) == ["rotary-scaling: type linear, factor 2.0 (there: none)"]

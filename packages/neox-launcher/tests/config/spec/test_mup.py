"""The multipliers of muP against a table by hand, its factors in the model, and the file of base shapes."""

from dataclasses import replace
from math import sqrt

import pytest

from neox_config import ConfigError, resolve
from neox_config.spec.resume import compare, flat_values, in_effect, recorded_values
from neox_launcher.plan.base_shapes import save_base_shapes

# Width times 4 (heads 2, head width 2), MLP times 8, depth times 2; minimal.yml has 4 layers of width 64.
BASE = "{hidden_size: 16, num_attention_heads: 2, head_dim: 8, mlp_width: 32, num_layers: 2}"
WIDER = f"use_mup: true\nmup_base: {BASE}\n"
ROOT = sqrt(0.5)

# (standard deviation, rate, epsilon) by kind; weight decay is 1 / rate everywhere.
ADAM = {
    "vocabulary": (1, 1, 1 / 4),
    "position": (1, 1, 1 / 4),
    "vector": (1, 1, 1 / 4),
    "layer_vector": (1, 1, 1 / 8),
    "qkv": (1 / 2, 1 / 4, 1 / 8),
    "qkv_bias": (1, 1, 1 / 8),
    # Half of what it adds, and half of what an update adds: of a branch that is multiplied by 1/2.
    "dense": (1 / 4, 1 / 8, 1 / 4),
    "dense_bias": (1 / 2, 1 / 2, 1 / 4),
    "up": (1 / 2, 1 / 4, 1 / 16),
    "up_bias": (1, 1, 1 / 16),
    "down": (ROOT / 4, 1 / 16, 1 / 4),
    "down_bias": (1 / 2, 1 / 2, 1 / 4),
    "other": (1, 1, 1),
}
SGD = {
    "vocabulary": 4,
    "position": 4,
    "vector": 4,
    "layer_vector": 4 * 2,
    "qkv": 4 / 4 * 2,
    "qkv_bias": 4 * 2,
    "dense": 4 / 4 * 2 / 4,
    "dense_bias": 4 * 2 / 4,
    "up": 8 / 4 * 2,
    "up_bias": 8 * 2,
    "down": 4 / 8 * 2 / 4,
    "down_bias": 4 * 2 / 4,
    "other": 1,
}
# Of the singular values of Muon's own step to sqrt(rows / columns); the base model has an MLP of 32.
MUON = {
    "qkv": 1.0,
    "dense": 1 / 2,
    "up": sqrt(8 / 4) * sqrt(32 / 16) / sqrt(256 / 64),
    "down": sqrt(4 / 8) / 2,
    "vocabulary": 1,
    "down_bias": 1 / 2,
}
RMS = {
    "qkv": 1 / 2,
    "dense": 1 / 2 / 2,
    "up": sqrt(8 / 4) * sqrt(32 / 256),
    "down": sqrt(4 / 8) * sqrt(32 / 256) / 2,
}


def multipliers(load, *overrides):
    return resolve(load(WIDER, *overrides), devices=1).run.multipliers


@pytest.mark.parametrize("kind", ADAM)
@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "Lion"])
def test_multipliers_of_adam_and_lion(load, optimizer, kind):
    found, (std, rate, epsilon) = multipliers(load, f"optimizer.type={optimizer}")[kind], ADAM[kind]
    assert (found.std, found.rate, found.epsilon) == pytest.approx((std, rate, epsilon), rel=1e-15)
    assert found.decay == pytest.approx(1 / rate, rel=1e-15)


def test_multipliers_of_sgd(load):
    found = multipliers(load, "optimizer.type=SGD")
    assert {kind: each.rate for kind, each in found.items()} == pytest.approx(SGD, rel=1e-15)
    assert {kind: each.decay * each.rate for kind, each in found.items()} == pytest.approx(
        dict.fromkeys(SGD, 1), rel=1e-15
    )


def test_multipliers_of_muon(load):
    found = multipliers(load, "optimizer.type=Muon")
    assert {kind: found[kind].rate for kind in MUON} == pytest.approx(MUON, rel=1e-15)
    assert [found[kind].epsilon for kind in ("up", "vocabulary", "up_bias")] == [1, 1 / 4, 1 / 16]
    rms = multipliers(load, "optimizer.type=Muon", "optimizer.params.scale=match_rms_adamw")
    assert {kind: rms[kind].rate for kind in RMS} == pytest.approx(RMS, rel=1e-15)
    # A head has twice the rows and four times the inputs, and a step as large.
    heads = multipliers(load, "optimizer.type=Muon", "optimizer.params.qkv=per_head")
    assert heads["qkv"].rate == pytest.approx(sqrt(2 / 4), rel=1e-15)
    assert heads["qkv"].rows == found["qkv"].rows == 4


def test_the_base_model_has_no_multipliers_but_the_initial_scale(load):
    base = "{hidden_size: 64, num_attention_heads: 4, head_dim: 16, mlp_width: 256}"
    plain = resolve(load(), devices=1)
    same = resolve(load(f"use_mup: true\nmup_base: {base}"), devices=1)
    assert same.model == plain.model
    assert same.run.initialization == plain.run.initialization
    for optimizer in ("Adam", "Lion", "SGD", "Muon"):
        config = load(f"use_mup: true\nmup_base: {base}\nmup_init_scale: 3", f"optimizer.type={optimizer}")
        for kind, each in resolve(config, devices=1).run.multipliers.items():
            std = 1.0 if kind == "other" else 3.0
            assert replace(each, reason="") == replace(type(each)(std=std), reason=""), kind


def test_factors_multiply_the_scales_of_the_model(load):
    text = f"{WIDER}embedding_scale: 3\nlogit_scale: 5\nmup_embedding_mult: 2\nmup_output_temp: 10\n"
    model = resolve(load(text), devices=1).model
    assert model.embedding.scale == 6
    assert model.head.scale == 5 / (4 * 10)
    # 1 / sqrt(8) of the base, and 1 / 2 for heads twice as wide.
    assert model.layers[0].mixer.scale == pytest.approx(8**-0.5 / 2, rel=1e-15)
    hot = resolve(load(f"{WIDER}attention_scale: 0.3\nmup_attn_temp: 4"), devices=1).model
    assert {layer.mixer.scale for layer in hot.layers} == {0.3 / 2 / 4}


def test_with_heads_of_the_same_width_attention_is_the_usual(load):
    base = "{hidden_size: 16, num_attention_heads: 1, head_dim: 16, mlp_width: 32}"
    model = resolve(load(f"use_mup: true\nmup_base: {base}"), devices=1).model
    assert {layer.mixer.scale for layer in model.layers} == {None}


def test_learned_positions_hold_the_multiples_of_their_output(load):
    found = multipliers(load, "mup_embedding_mult=4", "mup_rp_embedding_mult=2")
    assert found["vocabulary"].std == 1
    assert (found["position"].std, found["position"].rate, found["position"].epsilon) == (8, 8, 1 / 32)


def test_shapes_are_saved_and_read(load, tmp_path):
    path = tmp_path / "base.yml"
    small = load(f"use_mup: true\nsave_base_shapes: true\nbase_shapes_file: {path}", "mlp_width=100")
    assert save_base_shapes(small) == path
    shapes = "hidden-size: 64\nnum-attention-heads: 4\nhead-dim: 16\nmlp-width: 100\nnum-layers: 4\n"
    assert path.read_text() == shapes
    config = load(f"use_mup: true\nbase_shapes_file: {path}\nmup_base: {{num_layers: 1}}", "hidden_size=128")
    assert config.mup.mup_base.model_dump() == {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 16,
        "mlp_width": 100,
        "num_layers": 1,
    }
    # What is recorded does not need the file.
    path.unlink()
    assert flat_values(config)["mup_base"]["mlp_width"] == 100


@pytest.mark.parametrize("text", ["hidden-size: 64\nwidth: 3", "a: [", None, "hidden-size: x"])
def test_another_file_is_refused(load, tmp_path, text):
    path = tmp_path / "base.yml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(f"use_mup: true\nbase_shapes_file: {path}")
    assert refused.value.problems[0].name in ("base_shapes_file", "mup_base.hidden_size")


def test_a_resume_compares_the_factors_as_the_model_and_the_rates_as_the_training(load):
    def recorded(text):
        resolved = resolve(load(text), devices=1)
        return recorded_values(resolved, fingerprint="f" * 64, vocab_size=10)

    one = recorded(WIDER)
    assert compare(one, recorded(WIDER), devices=1).model == ()
    hotter = compare(one, recorded(f"{WIDER}mup_output_temp: 2"), devices=1)
    assert [change.label for change in hotter.model] == ["logit_scale"]
    assert [change.label for change in hotter.training] == ["mup_output_temp"]
    # The same logits by other means are the same model.
    shape = {"logit_scale": 0.25, "attention_scale": 8**-0.5 / 2}
    plain = recorded("".join(f"{name}: {value}\n" for name, value in shape.items()))
    assert compare(one, plain, devices=1).model == ()
    assert (
        "mup_base.hidden_size"
        not in in_effect(resolve(load("mup_base: {hidden_size: 8}"), devices=1))["training"]
    )

"""Models of transformers with experts: both forms of files, what is refused, and what other classes lack."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from neox_config import load_config
from neox_config.spec.model import Experts
from neox_config.spec.write_model import settings_of
from neox_model.convert import from_hf as importing
from neox_model.convert import to_hf as exporting
from neox_model.convert.errors import ConversionError, ProofError
from neox_model.convert.families import FAMILIES, fitting_family
from neox_model.convert.from_hf import from_hf, open_hf
from neox_model.convert.to_hf import to_hf
from neox_model.convert.verify import verify
from support.hf_models import plain_settings, write_model
from support.refusals import refused
from support.tiers import slow_except

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
SIZES = {
    "num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 20, "max_position_embeddings": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 6, "shared_expert_intermediate_size": 8,
}  # fmt: skip


@pytest.fixture
def unproven(monkeypatch):
    for module in (importing, exporting):
        monkeypatch.setattr(module, "prove", lambda *arguments, **options: {})


def rewritten(folder, target):
    """Write a model in the form that transformers has in memory, in which files may be, too."""
    import transformers

    target.mkdir()
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    kind.from_pretrained(folder).save_pretrained(target, save_original_format=False)
    for path in folder.glob("tokenizer*"):
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("family", slow_except(MIXTURES, "mixtral"))
def test_files_with_one_tensor_for_all_experts_are_the_same_model(tmp_path, family, unproven):
    published = write_model(tmp_path / "published", family, plain_settings(family))
    fused = rewritten(published, tmp_path / "fused")
    names = [set(load_file(folder / "model.safetensors")) for folder in (published, fused)]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names[1] - names[0]
    from_hf(fused, tmp_path / "ours")
    to_hf(tmp_path / "ours" / "global_step0", tmp_path / "back")
    written, there = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", published))
    assert written.keys() == there.keys()
    assert all(torch.equal(written[name], there[name]) for name in there)
    assert verify(fused, published)["verdict"] == "equal"
    assert verify(tmp_path / "ours", fused)["verdict"] == "equal"


@pytest.mark.parametrize("family", slow_except(MIXTURES, "qwen2_moe"))
def test_one_changed_value_of_one_expert_is_found(tmp_path, family, unproven):
    published = write_model(tmp_path / "published", family, plain_settings(family))
    from_hf(published, tmp_path / "ours")
    path = published / "model.safetensors"
    tensors = load_file(path)
    name = next(each for each in tensors if "experts.3." in each and ("up" in each or "w3" in each))
    tensors[name][1, 2] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})
    with refused(ProofError, "layers.0.mlp.experts.up"):
        verify(tmp_path / "ours", published)


def read(family, **changes):
    return FAMILIES[family].read({**SIZES, **changes})


def test_every_second_layer_and_others_have_experts_of_their_own_width():
    spec = read("qwen2_moe", decoder_sparse_step=2, mlp_only_layers=[3])
    widths = [(type(layer.channel).__name__, layer.channel.width) for layer in spec.layers]
    assert widths == [("MLP", 20), ("Experts", 6), ("MLP", 20), ("MLP", 20)]
    settings = settings_of(spec)
    assert (settings["moe-layers"], settings["mlp-width"], settings["moe-expert-width"]) == ([1], 20, 6)
    written = FAMILIES["qwen2_moe"].write(spec)
    assert written["mlp_only_layers"] == [0, 2, 3]
    assert FAMILIES["qwen2_moe"].read(written) == spec


def test_weights_are_normalized_and_shared_experts_there_as_in_each_class():
    found = {family: read(family).layers[0].channel for family in MIXTURES}
    seen = {name: (each.normalized, each.shared_width, each.shared_gate) for name, each in found.items()}
    assert seen == {
        "mixtral": (True, 0, False),
        "qwen2_moe": (False, 8, True),
        "qwen3_moe": (False, 0, False),
        "olmoe": (False, 0, False),
    }
    assert found["mixtral"].width == found["olmoe"].width == 20
    assert found["mixtral"].number == 4  # transformers reads num_experts, too.


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("olmoe", {"clip_qkv": 8.0}),
        ("olmoe", {"head_dim": 4}),
        ("mixtral", {"router_jitter_noise": 0.1}),
        ("mixtral", {"num_local_experts": 1}),
        ("qwen2_moe", {"mlp_only_layers": ["0"]}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}),
        ("qwen3_moe", {"decoder_sparse_step": 0}),
        ("qwen3_moe", {"num_experts": 0}),
    ],
)
def test_what_ours_cannot_have_is_refused(family, changes):
    with refused(ConversionError, *changes):
        read(family, **changes)


def test_a_run_chooses_the_largest_scores_as_the_class_does(tmp_path):
    found = open_hf(write_model(tmp_path, "olmoe", plain_settings("olmoe")))
    assert found.settings(tmp_path)["moe-router-type"] == "topk"


def with_experts(spec, **changes):
    from dataclasses import replace

    layers = [replace(layer, channel=replace(layer.channel, **changes)) for layer in spec.layers]
    return replace(spec, layers=tuple(layers))


@pytest.mark.parametrize("family", MIXTURES)
def test_only_classes_with_the_same_experts_fit(family):
    spec = read(family)
    assert isinstance(spec.layers[0].channel, Experts)
    assert fitting_family(spec, None).name == family
    assert fitting_family(with_experts(spec, normalized=True), family).name == family
    for changes, name in (({"scores": "sigmoid"}, "moe-scores"), ({"has_bias": True}, "moe-expert-bias")):
        with refused(ConversionError, name):
            fitting_family(with_experts(spec, **changes), None)
    for other in FAMILIES.keys() - {*MIXTURES, "gpt_oss"}:
        with refused(ConversionError, "moe-num-experts"):
            fitting_family(spec, other)


def test_experts_of_gpt_neox_without_a_gate_fit_no_class():
    config = load_config(
        [],
        overrides=[
            *("num-layers=2", "hidden-size=16", "num-attention-heads=2", "seq-length=8", "train-iters=1"),
            *("max-position-embeddings=8", "train-micro-batch-size-per-gpu=1", "moe-num-experts=4"),
            *("pos-emb=rotary", "norm=rmsnorm", 'optimizer={"type": "Adam", "params": {"lr": 1e-3}}'),
        ],
    )
    from neox_config import resolve

    with refused(ConversionError, "MixtralForCausalLM", "activation"):
        fitting_family(resolve(config, devices=1).model, None)


@pytest.mark.parametrize("gap", [1e-3, 1e-7])
def test_positions_are_compared_up_to_a_choice_between_equal_scores(gap):
    from neox_model.convert.proof.choices import clear_choices
    from neox_model.layers.experts import Router
    from neox_model.parallel.linear import zero_init

    router = Router(3, 3, chosen=1, init=zero_init)
    with torch.no_grad():
        router.weight.copy_(torch.eye(3))
    hidden_SBD = torch.tensor([[[2.0, 1.0, 0.0]] * 2] * 4)
    hidden_SBD[2, 1] = torch.tensor([1.0, 1.0 - gap, 0.0])
    clear = clear_choices(torch.nn.Sequential(router), lambda: router(hidden_SBD))
    assert clear.tolist() == [[True] * 4, [True, True, gap > 1e-5, gap > 1e-5]]
    assert clear_choices(torch.nn.Linear(3, 3), lambda: None) is None

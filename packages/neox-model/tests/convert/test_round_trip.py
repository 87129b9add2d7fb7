"""A model of transformers becomes a checkpoint of ours and the same model again."""

import json
import logging

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from neox_config import load_config
from neox_config.spec.resume import flat_values
from neox_model.api.model import load_model
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.stream import StreamedTensor
from neox_model.convert import from_hf as importing
from neox_model.convert import to_hf as exporting
from neox_model.convert.cli import main
from neox_model.convert.from_hf import from_hf
from neox_model.convert.to_hf import to_hf
from neox_model.convert.weights import WeightFiles, write_weights
from support.checkpoint_edits import edit_tensors
from support.hf_models import ENTRIES, FAMILIES, SMALL, plain_settings, random_settings, write_model
from support.refusals import refused


def assert_same_weights(one, other):
    there, here = WeightFiles(one), WeightFiles(other)
    assert there.tensors.keys() == here.tensors.keys()
    for name, stored in there.tensors.items():
        assert here.tensors[name].dtype == stored.dtype
        assert torch.equal(here.whole(name), there.whole(name)), name


def class_in(folder):
    config = json.loads((folder / "config.json").read_text())
    return config["model_type"], config["architectures"]


def round_trip(folder, family, settings, **options):
    write_model(folder / "theirs", family, settings, **options)
    imported = from_hf(folder / "theirs", folder / "ours")
    exported = to_hf(folder / "ours" / "global_step0", folder / "back")
    assert_same_weights(folder / "theirs", folder / "back")
    assert class_in(folder / "back") == class_in(folder / "theirs")
    return imported, exported


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_trip_gives_the_same_bits(tmp_path, family):
    imported, exported = round_trip(tmp_path, family, random_settings(family, 0))
    for result in (imported, exported):
        assert result["texts_tokenized_alike"] == 1000
        assert max(result["largest_differences"].values()) < 1e-5
    assert exported == json.loads((tmp_path / "back" / "verification.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_model_comes_back_as_the_class_that_was_read(tmp_path, monkeypatch, family):
    """Llama computes a Mistral without a window, too. The class is also kept by what trains the model."""
    for module in (importing, exporting):
        monkeypatch.setattr(module, "prove", lambda *arguments, **options: {})
    theirs = write_model(tmp_path / "theirs", family, plain_settings(family))
    from_hf(theirs, tmp_path / "ours")
    to_hf(tmp_path / "ours" / "global_step0", tmp_path / "back")
    assert class_in(tmp_path / "back") == class_in(theirs)
    configured = load_config([tmp_path / "ours" / "model.yml"])
    loaded = [load_model(theirs), load_model(tmp_path / "ours")]
    found = [flat_values(configured)["hf_family"], *(model.settings["hf_family"] for model in loaded)]
    assert found == [family] * 3
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").config.model_type == family


def test_the_option_overrides_the_class_that_was_read(tmp_path, monkeypatch):
    for module in (importing, exporting):
        monkeypatch.setattr(module, "prove", lambda *arguments, **options: {})
    write_model(tmp_path / "theirs", "mistral", plain_settings("mistral"))
    from_hf(tmp_path / "theirs", tmp_path / "ours")
    to_hf(tmp_path / "ours" / "global_step0", tmp_path / "back", family="llama")
    assert class_in(tmp_path / "back") == ("llama", ["LlamaForCausalLM"])


def test_averages_are_exported_and_proven_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "prove", lambda *arguments, **options: {})
    write_model(tmp_path / "theirs", "llama", SMALL)
    from_hf(tmp_path / "theirs", tmp_path / "ours")
    checkpoint = tmp_path / "ours" / "global_step0"
    with refused(CheckpointError, "no averages"):
        to_hf(checkpoint, tmp_path / "back", ema=True)

    def average(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {f"model/{name}/ema": values / 2 for name, values in tensors.items()}

    edit_tensors(checkpoint, average)
    command = ["to-hf", "--load", str(checkpoint), "--output", str(tmp_path / "back"), "--ema"]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    there, here = WeightFiles(tmp_path / "theirs"), WeightFiles(tmp_path / "back")
    assert there.tensors.keys() == here.tensors.keys()
    for name in there.tensors:
        assert torch.equal(here.whole(name), there.whole(name) / 2), name


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_trip_of_random_shapes_gives_the_same_bits(tmp_path, family, seed):
    dtype = [torch.float32, torch.bfloat16, torch.float16][seed % 3]
    round_trip(tmp_path, family, random_settings(family, seed), dtype=dtype, seed=seed)


@pytest.mark.slow
def test_padding_of_the_vocabulary_is_left_out_on_request(tmp_path):
    write_model(tmp_path / "theirs", "llama", SMALL | {"vocab_size": ENTRIES + 8}, dtype=torch.bfloat16)
    from_hf(tmp_path / "theirs", tmp_path / "padded")
    from_hf(tmp_path / "theirs", tmp_path / "trimmed", trim_vocab=True)
    to_hf(tmp_path / "padded" / "global_step0", tmp_path / "back", trim_vocab=True, dtype="fp32")
    theirs, back = WeightFiles(tmp_path / "theirs"), WeightFiles(tmp_path / "back")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(back.whole(name), theirs.whole(name)[:ENTRIES].float())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == ENTRIES
    settings = {name: load_config([tmp_path / name / "model.yml"]).model for name in ("padded", "trimmed")}
    assert settings["padded"].make_vocab_size_divisible_by == 9  # 280 entries and 288 rows.
    assert settings["trimmed"].make_vocab_size_divisible_by == 1


@pytest.mark.slow
def test_parts_a_chat_template_and_settings_of_generation_are_kept(tmp_path, caplog):
    """A folder with an older config.json."""
    folder = write_model(tmp_path / "theirs", "llama", SMALL, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    planned = [StreamedTensor(name, tuple(each.shape), each.dtype) for name, each in tensors.items()]
    parts = write_weights(
        folder, planned, ((name, [each]) for name, each in tensors.items()), file_bytes=3000
    )
    assert len(parts) > 2
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    generation = {"eos_token_id": [0, 5], "temperature": 0.7, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    caplog.set_level(logging.INFO, "neox_model")
    from_hf(folder, tmp_path / "ours")
    assert load_config([tmp_path / "ours" / "model.yml"]).generation.stop_tokens == (5,)
    assert load_model(tmp_path / "ours").config.generation.stop_tokens == (5,)
    assert "; generated texts also end at '%' (5) (stop-tokens)" in caplog.text
    to_hf(tmp_path / "ours" / "global_step0", tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")
    template, back = "chat_template.jinja", tmp_path / "back"
    assert (back / template).read_text() == (folder / template).read_text()
    assert json.loads((back / "generation_config.json").read_text()) == generation
    (tmp_path / "ours" / "generation_config.json").unlink()
    to_hf(tmp_path / "ours" / "global_step0", tmp_path / "recorded")
    recorded = json.loads((tmp_path / "recorded" / "generation_config.json").read_text())
    assert recorded["eos_token_id"] == [0, 5]  # Those that the checkpoint records.
    rope = json.loads((back / "config.json").read_text())["rope_parameters"]
    assert rope == {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}


@pytest.mark.slow
@pytest.mark.parametrize("original", [8, 400])
@pytest.mark.parametrize(("family", "fraction"), [("llama", 1.0), ("gpt_neox", 0.5)])
def test_longrope_comes_back_with_its_factors(tmp_path, family, fraction, original):
    """Transformers chooses by the tokens of a call, so the proof computes short and long sequences."""
    pairs = int(SMALL["hidden_size"] // SMALL["num_attention_heads"] * fraction) // 2
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": original,
        "short_factor": [1.0 + 0.5 * i for i in range(pairs)], "long_factor": [2.0 + i for i in range(pairs)],
    }  # fmt: skip
    if fraction != 1.0:
        rope["partial_rotary_factor"] = fraction
    imported, _ = round_trip(
        tmp_path, family, {**SMALL, "max_position_embeddings": 500, "rope_parameters": rope}
    )
    assert max(imported["largest_differences"].values()) < 1e-5
    theirs, back = (
        json.loads((tmp_path / name / "config.json").read_text())["rope_parameters"]
        for name in ("theirs", "back")
    )
    assert {name: back[name] for name in rope} == {name: theirs[name] for name in rope}

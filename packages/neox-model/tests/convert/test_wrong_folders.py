"""Folders with wrong contents are refused with one message, and code in them does not run."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from neox_model.checkpoint.contents import Manifest
from neox_model.convert import from_hf as importing
from neox_model.convert.errors import ConversionError, ProofError
from neox_model.convert.families import FAMILIES, family_of_config
from neox_model.convert.output import folder_written_aside
from neox_model.convert.reference import load_config, load_tokenizer, meta_model
from neox_model.convert.verify import verify
from neox_model.convert.weights import WeightFiles
from support.hf_models import ENTRIES, write_model, write_tokenizer

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
    "vocab_size": ENTRIES,
}
YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_hidden_layers": "1"},
        {"num_attention_heads": 0},
        {"hidden_act": ["silu"]},
        {"rms_norm_eps": float("nan")},
        {"tie_word_embeddings": "no"},
        {"attention_bias": "x"},
        {"architectures": 3},
        {"rope_parameters": {"rope_theta": "x"}},
        {"rope_parameters": {"rope_theta": float("inf")}},
        {"rope_parameters": YARN | {"original_max_position_embeddings": "x"}},
        {"rope_parameters": YARN | {"beta_fast": "x"}},
        {"rope_parameters": YARN | {"mscale": "x", "mscale_all_dim": 1.0}},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": "x"},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "layer_types": 3},
    ],
)
def test_a_value_of_another_type_is_named(wrong):
    config = {**LLAMA, **wrong}
    with pytest.raises(ConversionError, match=r"config\.json has "):
        family_of_config(config).read(config)


@pytest.mark.parametrize("wrong", [{"eos_token_id": "abc"}, {"pad_token_id": 99999}])
def test_a_configuration_that_transformers_refuses_is_one_message(tmp_path, wrong):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **wrong}))
    family = FAMILIES["llama"]
    with pytest.raises(ConversionError, match=r"transformers cannot (read|build) .*config\.json"):
        meta_model(load_config(tmp_path, family), family)


def test_code_next_to_a_tokenizer_does_not_run_whatever_is_typed(tmp_path, monkeypatch):
    write_tokenizer(tmp_path)
    settings = {"tokenizer_class": "Other", "auto_map": {"AutoTokenizer": ["code.Other", "code.Other"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(
        f"from transformers import PreTrainedTokenizerFast\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "class Other(PreTrainedTokenizerFast):\n    pass\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ProofError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_the_working_directory_and_a_link_can_be_the_output(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for path in (Path(), tmp_path / "link"):
        with folder_written_aside(path) as aside:
            (aside / "file").write_text("contents")
        assert (tmp_path / "here" / "file").read_text() == "contents"
        (tmp_path / "here" / "file").unlink()


def test_a_stored_number_without_dimensions_is_compared(tmp_path):
    torch.save({"number": torch.tensor(2.0)}, tmp_path / "pytorch_model.bin")
    (chunk,) = WeightFiles(tmp_path).row_chunks("number")
    assert chunk.tolist() == [2.0]


def test_checkpoints_that_differ_in_an_option_of_no_class_are_different(tmp_path, monkeypatch):
    small = {name: value for name, value in LLAMA.items() if name not in ("architectures", "model_type")}
    write_model(tmp_path / "theirs", "llama", small)
    monkeypatch.setattr(importing, "prove", lambda *arguments, **options: {})
    importing.from_hf(tmp_path / "theirs", tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    folder = tmp_path / "other" / "global_step0"
    manifest = Manifest.read(folder)
    manifest.config["apply_residual_connection_post_layernorm"] = True
    (folder / "manifest.json").write_text(manifest.to_json())
    assert verify(tmp_path / "one", tmp_path / "one")["verdict"] == "equal"
    result = verify(tmp_path / "one", tmp_path / "other")
    assert result["verdict"] == "different"
    assert result["differences"] == ["apply_residual_connection_post_layernorm is false in A and true in B"]

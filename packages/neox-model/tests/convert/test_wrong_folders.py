"""Folders with wrong contents are refused with one message, and code in them does not run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from neox_model.checkpoint.contents import Manifest
from neox_model.convert import from_hf as importing
from neox_model.convert.checkpoints import Checkpoint
from neox_model.convert.errors import ConversionError, ProofError
from neox_model.convert.families import FAMILIES, family_of_config
from neox_model.convert.output import folder_written_aside
from neox_model.convert.reference import load_config, load_tokenizer, meta_model
from neox_model.convert.requests import check_model
from neox_model.convert.verify import verify
from neox_model.convert.weights import WeightFiles
from support.hf_models import ENTRIES, write_model, write_tokenizer
from support.refusals import refused

SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
    "vocab_size": ENTRIES,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_no_damage(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with refused(ConversionError, name, "LFS"):
        check_model(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_hidden_layers": "1"},
        {"num_hidden_layers": 10_001},
        {"num_attention_heads": 0},
        {"hidden_act": ["silu"]},
        {"rms_norm_eps": float("nan")},
        {"tie_word_embeddings": "no"},
        {"architectures": 3},
        {"rope_parameters": {"rope_theta": float("inf")}},
        {"rope_parameters": YARN | {"original_max_position_embeddings": "x"}},
        {"rope_parameters": YARN | {"mscale": "x", "mscale_all_dim": 1.0}},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": "x"},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "layer_types": 3},
    ],
)
def test_a_value_of_another_type_is_named(wrong):
    config = {**LLAMA, **wrong}
    with refused(ConversionError, "config.json"):
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
    with refused(ProofError, "load the tokenizer"):
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


def imported(folder, output, **options):
    """Write a small Llama, import it without a proof, and return its folder."""
    write_model(folder, "llama", SIZES, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importing, "prove", lambda *arguments, **options: {})
        importing.from_hf(folder, output)
    return folder


def test_checkpoints_that_differ_in_an_option_of_no_class_are_different(tmp_path):
    imported(tmp_path / "theirs", tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    folder = tmp_path / "other" / "global_step0"
    manifest = Manifest.read(folder)
    manifest.config["apply_residual_connection_post_layernorm"] = True
    (folder / "manifest.json").write_text(manifest.to_json())
    assert verify(tmp_path / "one", tmp_path / "one")["verdict"] == "equal"
    result = verify(tmp_path / "one", tmp_path / "other")
    assert result["verdict"] == "different"
    assert result["differences"] == ["apply-residual-connection-post-layernorm: false (there: true)"]


def test_older_names_and_a_copy_of_the_tied_embedding_are_the_same_model(tmp_path):
    sizes = {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 8, "vocab_size": ENTRIES}
    write_model(tmp_path / "new", "gpt2", sizes)
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    path = tmp_path / "old" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): values for name, values in load_file(path).items()}
    embedding = tensors["wte.weight"]
    extra = {"h.0.attn.bias": torch.ones(8, 8), "lm_head.weight": embedding.clone()}
    save_file({**tensors, **extra}, path)
    assert verify(tmp_path / "old", tmp_path / "new") == {
        "verdict": "equal",
        "differences": [],
        "rounded": [],
        "tensors": 16,
    }
    save_file({**tensors, "lm_head.weight": -embedding}, path)
    result = verify(tmp_path / "old", tmp_path / "new")
    assert result["differences"] == [
        "tied (no-weight-tying): false (there: true)",
        "lm_head.weight is only in A",
    ]
    save_file({**tensors, "transformer.wte.weight": embedding.clone()}, path)
    with refused(ConversionError, "wte.weight"):
        verify(tmp_path / "old", tmp_path / "new")


def test_a_checkpoint_is_compared_in_the_type_of_the_weights_whatever_older_files_add(tmp_path):
    imported(tmp_path / "theirs", tmp_path / "ours")
    path = write_model(tmp_path / "half", "llama", SIZES, dtype=torch.float16) / "model.safetensors"
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**load_file(path), **extra}, path)
    result = verify(tmp_path / "ours", tmp_path / "half")
    assert result["verdict"] == "equal after rounding"
    (what,) = result["rounded"]
    assert what.startswith(
        "10 tensors of the model of transformers (float16) are those of the checkpoint (float32"
    )


def test_a_part_with_more_bits_is_not_rounded_before_it_is_compared(tmp_path):
    folder = imported(tmp_path / "theirs", tmp_path / "ours", dtype=torch.bfloat16)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.k_proj.weight"
    wider = tensors[name].float()
    save_file(tensors | {name: wider}, path, metadata={"format": "pt"})
    assert verify(tmp_path / "ours", tmp_path / "theirs")["verdict"] == "equal"
    importing.from_hf(tmp_path / "theirs", tmp_path / "wider")
    assert (
        Checkpoint(tmp_path / "wider" / "global_step0").dtype("layers.0.attention.qkv.weight")
        == torch.float32
    )
    wider[0, 0] = torch.nextafter(wider[0, 0], torch.tensor(1.0))
    save_file(tensors | {name: wider}, path, metadata={"format": "pt"})
    with refused(ProofError, "1", "k_proj.weight"):
        verify(tmp_path / "ours", tmp_path / "theirs")


def test_a_configuration_with_which_transformers_cannot_compute_is_refused(tmp_path):
    write_model(tmp_path / "theirs", "qwen2", {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2})
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    # transformers builds a mask of a window for the first layer, but the window is switched off.
    kinds = ["sliding_attention", "full_attention"]
    config |= {"use_sliding_window": False, "sliding_window": 8, "layer_types": kinds}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    with refused(ConversionError, "layer_types", "use_sliding_window"):
        importing.from_hf(tmp_path / "theirs", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]

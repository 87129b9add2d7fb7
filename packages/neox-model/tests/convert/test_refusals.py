"""What cannot be converted is refused in one message that says what, where and what to do."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers

from neox_config import load_config, resolve
from neox_config.errors import NeoXError
from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_config.spec.recorded import model_of
from neox_config.spec.resume import flat_values
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.stream import StreamedTensor
from neox_model.convert import from_hf as importing
from neox_model.convert import output as writing
from neox_model.convert import to_hf as exporting
from neox_model.convert.checkpoints import Checkpoint
from neox_model.convert.differences import differences
from neox_model.convert.errors import ConversionError, ProofError
from neox_model.convert.families import FAMILIES, family_of_config
from neox_model.convert.from_hf import from_hf
from neox_model.convert.to_hf import to_hf
from neox_model.convert.tokenizer_files import padding_multiple, write_json
from neox_model.convert.verify import verify
from neox_model.convert.weights import WeightFiles, write_weights
from neox_model.processes import load_tokenizer
from neox_model.train.export import check_export
from support import refusals
from support.checkpoint_edits import edit_tensors
from support.hf_models import ENTRIES, SMALL, random_settings, write_model
from support.settings import resolved_from

NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
SCALES = "apply_query_key_layer_scaling"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Return a folder with a model of transformers ("theirs") and the checkpoint of it ("ours")."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("originals")
    write_model(folder / "theirs", "llama", SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importing, "prove", lambda *arguments, **options: {})
        from_hf(folder / "theirs", folder / "ours")
    return folder


@pytest.fixture
def theirs(tmp_path, originals):
    return shutil.copytree(originals / "theirs", tmp_path / "theirs")


@pytest.fixture
def ours(tmp_path, originals):
    """Return a copy of the checkpoint, whose tokenizer is where the original has it."""
    return shutil.copytree(originals / "ours" / "global_step0", tmp_path / "ours" / "global_step0")


def edit(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_recorded(folder, change):
    manifest = Manifest.read(folder)
    change(manifest.config)
    (folder / "manifest.json").write_text(manifest.to_json())


def _rename(tensors, prefix):
    """Put a prefix before the names of all tensors."""
    for name in list(tensors):
        tensors[f"{prefix}{name}"] = tensors.pop(name)


def refused(convert, output, *parts):
    """Check that a conversion is refused with parts of a message, and that nothing is left."""
    with pytest.raises(NeoXError) as caught:
        convert()
    for part in parts:
        assert part in str(caught.value)
    assert not output.exists()
    assert [path.name for path in output.parent.iterdir() if path.name.startswith(".")] == []


def import_refused(folder, *parts, **options):
    output = folder.parent / "output"
    refused(lambda: from_hf(folder, output, **options), output, *parts)


def export_refused(folder, *parts, **options):
    output = folder.parent / "output"
    refused(lambda: to_hf(folder, output, **options), output, *parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert' with architectures ['LlamaForCausalLM']; only "),
        ({"architectures": ["LlamaForSequenceClassification"]}, "['LlamaForSequenceClassification']; only"),
        (
            {"model_type": "mine", "auto_map": {"AutoModel": "code.Model"}},
            "names code in the model's folder (auto_map), which is never run",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type: 'dynamic', which neox-model does not have",
        ),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type: ['yarn'], which neox-model"),
        ({"rope_parameters": [1]}, "rope_parameters: [1], which is not a block; copy it again"),
        ({"rope_parameters": {"full_attention": {}}}, "has rope_parameters by type of layer"),
        ({"rope_parameters": {"rope_theta": 777.5}}, "rope_theta: 777.5, but rotary-emb-base"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor: 0.5, which neox-model does not have",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "has factor: None, which is not a number"),
        ({"head_dim": "32"}, "has head_dim: '32', which is not a whole number of at least 1"),
        ({"hidden_act": "relu2"}, "hidden_act: 'relu2', but only silu, swish, gelu, gelu_pytorch_tanh can"),
        ({"quantization_config": {"bits": 4}}, "neox-model does not have; only a model without it can be"),
        ({"num_hidden_layers": None}, "config.json has no num_hidden_layers; copy the folder again"),
        (
            {"num_attention_heads": 3},
            "hidden size (16) is not a multiple of the number of attention heads (3)",
        ),
        (
            {"vocab_size": ENTRIES - 1},
            f"model.embed_tokens.weight has the shape ({ENTRIES}, 16), but LlamaForCausalLM",
        ),
        (
            {"attention_bias": True},
            "does not contain model.layers.0.self_attn.o_proj.bias; copy the folder again",
        ),
        ({"intermediate_size": 24}, "has the shape (16, 20), but config.json requires (16, 24)"),
    ],
)
def test_a_configuration_that_we_cannot_build_is_refused_by_name(theirs, change, message):
    edit(theirs / "config.json", lambda config: config.update(change))
    import_refused(theirs, message)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mistral", {"layer_types": ["full_attention", "x"]}, "is not a list of full_attention or"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "has several layer_types"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "for each of 2 layers"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True"),
        ("gpt2", {"n_embd": 16, "n_head": 3, "n_layer": 2}, "hidden size of 16, which its 3 attention heads"),
        (
            "gpt2",
            {"n_embd": 8, "n_head": 2, "n_layer": 2, "head_dim": 8},
            "head_dim: 8, but the heads of GPT2",
        ),
        # The files of opt-350m.
        ("opt", {"word_embed_proj_dim": 4, "do_layer_norm_before": False}, "only opt-350m has such an emb"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before: False, but only True can be"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm: True, which neox-model"),
        ("mistral", {"is_causal": False}, "is_causal: False, which neox-model does not have"),
        ("gemma2", {"quantization_config": {"bits": 4}}, "only a model without it can be converted"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: 0, which is not a number above 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True, which neox"),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping: 5.0, which neox-model"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
            "rope_parameters.full_attention.partial_rotary_factor: 0.5, which neox-model does not have",
        ),
        (
            "olmo2",
            {"rope_scaling": {"partial_rotary_factor": 0.5}},
            "rope_scaling.partial_rotary_factor: 0",
        ),
        ("olmo3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling with type: 'linear'"),
        ("olmo3", {"rope_parameters": [1]}, "rope_parameters: [1], which is not a block"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": 5}}, "5, which is not a block"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: [1], which is not a list of 0 or 1"),
        (
            "smollm3",
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4},
            "layer_types with sliding_attention, but not use_sliding_window: true",
        ),
        ("gemma3", {}, "model with images (gemma3); save its part for text, whose model_type is gemma3_text"),
    ],
)
def test_options_of_one_class_are_refused_by_name(family, change, message):
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 16, "hidden_size": 8, "intermediate_size": 8}
    config = {"model_type": family, "architectures": [], "num_attention_heads": 2, **sizes, **change}
    with refusals.refused(ConversionError, "config.json") as caught:
        family_of_config(config).read(config)
    assert message in str(caught.value)


def test_the_name_of_a_model_on_the_hub_is_answered_with_the_command_that_downloads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refusals.refused(ConversionError, "some/model", "config.json", "NAME", "--local-dir"):
        from_hf(Path("some/model"), Path("imported"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(theirs, name):
    (theirs / name).unlink()
    import_refused(theirs, str(theirs), name)


def test_a_damaged_configuration_is_named(theirs):
    for contents in ("", "{", "[1]", "[" * 100_000):
        (theirs / "config.json").write_text(contents)
        import_refused(theirs, f"{theirs / 'config.json'}", "copy it again")


def test_damaged_weights_are_named(theirs):
    path = theirs / "model.safetensors"
    whole = path.read_bytes()
    for contents in (b"", b"\xff" * 100, b"\x05\0\0\0\0\0\0\0[1,2]", b"\2\0\0\0\0\0\0\0{}"):
        path.write_bytes(contents)
        import_refused(theirs, str(theirs))
    path.write_bytes(whole[:-1])
    import_refused(theirs, f"{path} is damaged")
    path.write_bytes(whole + b"more")  # Only transformers refuses it.
    import_refused(theirs, f"transformers cannot load {theirs}: ", "copy the folder again")


def test_a_data_type_that_is_not_read_is_named(theirs):
    edit_weights(theirs, lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.float8_e4m3fn)}))
    import_refused(theirs, f"its header is wrong for {NORM}, whose data type F8_E4M3 is none of F64, F32")


def test_problems_of_a_model_name_the_file_that_has_them(theirs):
    edit(theirs / "config.json", lambda config: config.update(rms_norm_eps=0.0))
    import_refused(theirs, f"{theirs / 'config.json'}: 1 problem", "rms-norm-epsilon: 0.0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"does not contain {NORM}; copy the folder again"),
        (lambda tensors: tensors.pop(EMBEDDING), f"does not contain {EMBEDDING}; copy the folder again"),
        (
            lambda tensors: tensors.update(more=torch.ones(1)),
            "contains more (of 1 tensor) that LlamaForCausalLM with this config.json does not have; use the "
            "config.json of these weights, or load the model with transformers and save it again",
        ),
        (lambda tensors: _rename(tensors, "module."), "or save the model itself, if its names begin with"),
        (
            lambda tensors: tensors.update({NORM: torch.ones(17)}),
            "has the shape (17,), but config.json requires (16,)",
        ),
        (
            lambda tensors: tensors[DOWN].fill_(torch.inf),
            f"{DOWN} contains values that are not finite",
        ),
        (
            lambda tensors: tensors[NORM][:1].fill_(torch.nan),
            f"{NORM} contains values that are not finite",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(theirs, change, message):
    edit_weights(theirs, change)
    import_refused(theirs, str(theirs), message)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../theirs/part.safetensors"}}, "names a file outside of its folder"),
        ({"weight_map": {"a": 5}}, "cannot read"),
        ({"weight_map": {"a": ""}}, "names a file outside of its folder"),
        ({"weight_map": {"a": "config.json"}}, "config.json is damaged"),
        ({"weight_map": {}}, f"does not contain {EMBEDDING}"),
        ({}, "'weight_map'; copy it again"),
        (
            {"weight_map": {NORM: "part.safetensors", "b": "part.safetensors"}},
            "the index names b in part.safetensors, which is not there",
        ),
        ({"weight_map": {NORM: "part.safetensors", DOWN: "again.safetensors"}}, "both contain "),
    ],
)
def test_an_index_that_does_not_fit_is_named(theirs, index, message):
    shutil.copyfile(theirs / "model.safetensors", theirs / "again.safetensors")
    (theirs / "model.safetensors").rename(theirs / "part.safetensors")
    (theirs / "model.safetensors.index.json").write_text(json.dumps(index))
    import_refused(theirs, message)


@pytest.mark.parametrize("whole", ["model.safetensors", "pytorch_model.bin"])
def test_missing_parts_of_a_model_are_named(theirs, whole):
    (theirs / "model.safetensors").unlink()
    (theirs / f"{whole}.index.json").write_text("[" * 100_000)
    import_refused(theirs, f"{whole}.index.json", "copy it again")
    (theirs / f"{whole}.index.json").write_text(json.dumps({"weight_map": {"a": "1.bin", "b": "2.bin"}}))
    import_refused(theirs, f"{theirs}: the index names a in 1.bin and 1 more, which is not there; copy")


class _Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def _as_pickle(folder, contents, **options):
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(contents, folder / "pytorch_model.bin", **options)


def test_a_pickle_with_code_is_refused_and_does_not_run(theirs):
    target = theirs.parent / "ran"
    _as_pickle(theirs, {NORM: torch.ones(16), "code": _Attack(str(target))})
    import_refused(theirs, "pytorch_model.bin contains something other than tensors, or is damaged")
    assert not target.exists()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_pickle_without_tensors_by_name_or_of_the_older_format_is_refused(theirs, is_new):
    one = torch.ones(1)
    for contents in ([one], {"a": 1}, one, {"m": {"b": one}}, torch.nn.Linear(2, 2)):
        _as_pickle(theirs, contents, _use_new_zipfile_serialization=is_new)
        import_refused(
            theirs, "pytorch_model.bin contains something other than tensors", "torch 1.6 or later"
        )


def test_weights_of_torch_are_read_like_those_of_safetensors(theirs, originals):
    _as_pickle(theirs, load_file(theirs / "model.safetensors"))
    one, other = WeightFiles(theirs), WeightFiles(originals / "theirs")
    assert one.tensors.keys() == other.tensors.keys()
    for name in other.tensors:
        assert torch.equal(one.whole(name), other.whole(name))


def test_parts_are_written_at_the_size_and_read_as_one(tmp_path):
    tensors = {f"tensor {number}": torch.randn(3, number + 1) for number in range(5)}
    planned = [StreamedTensor(name, tuple(each.shape), each.dtype) for name, each in tensors.items()]
    values = ((name, [each[:1], each[1:]]) for name, each in tensors.items())
    files = write_weights(tmp_path, planned, values, file_bytes=80)
    sizes = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert [path.name for path in files] == [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sizes["metadata"] == {"total_size": 12 * 15}
    found = WeightFiles(tmp_path)
    assert all(torch.equal(found.whole(name), each) for name, each in tensors.items())


def test_a_tokenizer_that_is_damaged_or_too_large_is_refused(theirs):
    path = theirs / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens(["one more"])
    tokenizer.save(str(path))
    for options in ({}, {"trim_vocab": True}):
        import_refused(theirs, "has 281 entries, but the token embedding only 280 rows", **options)
    path.write_text("{}")
    import_refused(theirs, f"the tokenizer in {theirs} cannot be used")


def test_a_tokenizer_that_transformers_changes_is_refused(theirs):
    edit(
        theirs / "tokenizer_config.json",
        lambda settings: settings.update(tokenizer_class="GPT2Tokenizer", add_prefix_space=True),
    )
    import_refused(
        theirs,
        "the tokenizers encode ",
        " differently: ",
        "transformers loads GPT2Tokenizer, ",
        "which replaces parts of tokenizer.json (pre_tokenizer",
        "pass --tokenizer-as-stored (such a model can be trained, but not exported again",
    )


def test_a_tokenizer_that_transformers_replaces_by_the_type_of_the_model_is_used_on_request(
    tmp_path, monkeypatch
):
    theirs = write_model(tmp_path / "theirs", "qwen2", random_settings("qwen2", 0))
    path = theirs / "tokenizer.json"
    edit(path, lambda parts: parts.update(normalizer=None, pre_tokenizer=BYTES))
    write_json(theirs / "tokenizer_config.json", {"tokenizer_class": "TokenizersBackend"})
    with monkeypatch.context() as patch:
        # Large models take minutes to write: the tokenizers are compared before.
        patch.setattr(importing, "_write_checkpoint", lambda *arguments: pytest.fail("wrote the tensors"))
        import_refused(theirs, "pass --tokenizer-as-stored")
    import_refused(
        theirs,
        "transformers loads Qwen2Tokenizer, ",
        "which replaces parts of tokenizer.json (normalizer, pre_tokenizer",
        "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
    )
    output = theirs.parent / "imported"
    result = from_hf(theirs, output, tokenizer_as_stored=True)
    found = result["tokenizer_as_stored"]
    assert (found["transformers_loads"], found["replaces"][:2]) == (
        "Qwen2Tokenizer",
        ["normalizer", "pre_tokenizer"],
    )
    assert (output / "tokenizer.json").read_bytes() == path.read_bytes()
    monkeypatch.setattr(exporting, "write_weights", lambda *arguments: pytest.fail("wrote the tensors"))
    with refusals.refused(ConversionError, "transformers reads alike"):
        to_hf(output / "global_step0", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    # A run that is to be exported is refused at its start, for the same reason.
    with refusals.refused(NeoXError, "hf-export", "hf-export"):
        check_export(*_trained(output, tmp_path / "exported"))


def test_a_training_of_an_imported_model_may_be_exported(tmp_path):
    theirs = write_model(tmp_path / "theirs", "qwen2", random_settings("qwen2", 0))
    from_hf(theirs, tmp_path / "imported")
    check_export(*_trained(tmp_path / "imported", tmp_path / "exported"))
    assert not (tmp_path / "exported").exists()


def _trained(imported, exported):
    """Return the configuration of a run that is to be exported, and its tokenizer."""
    changes = ["data-path=corpus", f"save={imported / 'runs'}", f"hf-export={exported}"]
    config = load_config([imported / "model.yml"], overrides=changes)
    return resolve(config, devices=1), load_tokenizer(config.tokenizer)


def test_a_stored_tokenizer_requires_its_file(theirs):
    Tokenizer.from_file(str(theirs / "tokenizer.json")).model.save(str(theirs))
    (theirs / "tokenizer.json").unlink()
    import_refused(theirs, "contains no tokenizer.json", tokenizer_as_stored=True)


def test_a_padding_of_the_vocabulary_is_found_or_refused():
    for entries, rows in ((50_257, 50_304), (280, 288), (5, 5), (7, 12)):
        multiple = padding_multiple(entries, rows)
        assert -(-entries // multiple) * multiple == rows
    with refusals.refused(ConversionError, "make-vocab-size-divisible-by", "--trim-vocab"):
        padding_multiple(5, 10_000_019)


def test_values_that_float16_cannot_hold_are_refused(ours):
    edit_tensors(ours, lambda tensors: tensors["final_norm.weight"][:1].fill_(1e5))
    message = "final_norm.weight has values up to 1e+05, which torch.float16 cannot hold"
    export_refused(ours, message, dtype="fp16")


def test_values_that_are_not_finite_are_not_exported(ours):
    edit_tensors(ours, lambda tensors: tensors["final_norm.weight"][:1].fill_(torch.nan))
    export_refused(ours, "final_norm.weight contains values that are not finite; export another checkpoint")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("final_norm.weight"),
            "final_norm.weight has the shape none, and in the",
        ),
        (lambda tensors: tensors.update(more=torch.ones(2)), "more has the shape (2,), and in the"),
        (lambda tensors: tensors.pop(TOKEN_EMBEDDING), f"contains no {TOKEN_EMBEDDING}; save it again"),
        (lambda tensors: tensors.update({TOKEN_EMBEDDING: torch.ones(())}), f"contains no {TOKEN_EMBEDDING}"),
        (
            lambda tensors: tensors.update({"final_norm.weight": torch.ones(17)}),
            "final_norm.weight has the shape (17,), and in the model that it records (16,); save it again",
        ),
    ],
)
def test_a_checkpoint_of_other_tensors_is_refused(ours, change, message):
    edit_tensors(ours, change)
    export_refused(ours, str(ours), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "scalenorm"}, "norm: scalenorm (there: "),
        ({"pos_emb": "alibi"}, "pos-emb: alibi (there: "),
        ({"attention_config": [[["gmlp"], "all"]]}, "attention-config: gmlp"),
        ({"num_unique_layers": 1, "num_layers": 2}, "owner (num-unique-layers, param-sharing-style): 0 "),
        (
            {"apply_residual_connection_post_layernorm": True},
            "apply-residual-connection-post-layernorm: true (there: false)",
        ),
        ({"attention_config": [[["local"], "all"]]}, "sparsity-config.block: 16 (there: 1)"),
        ({"attention_scale": 0.3}, "attention-scale: 0.3 (there: none)"),
        ({"attention_softcap": 5.0}, "attention-softcap: 5.0 (there: none)"),
        ({"attention_sinks": True}, "attention-sinks: true (there: false)"),
        ({"attention_gate": "head"}, "attention-gate: head (there: none)"),
        ({"objective": "masked"}, "objective: masked (there: causal)"),
        ({"rotary_emb_base": 100.5}, "was written by another version, whose parameters this one cannot read"),
        ({"norm": "othernorm"}, "was written by another version, whose parameters this one cannot read"),
        (
            {"lora_rank": 4},
            "contains low-rank adapters alone; export them with neox-convert to-peft",
        ),
    ],
)
def test_options_that_no_class_has_are_named(ours, monkeypatch, change, message):
    monkeypatch.setattr(Checkpoint, "check_shapes", lambda self: None)
    edit_recorded(ours, lambda config: config.update(change))
    export_refused(ours, message)


@pytest.mark.parametrize("value", [5, None, "x", {"model": 5}, {"training": [1]}])
def test_values_in_effect_of_another_form_are_refused(ours, value):
    edit_recorded(ours, lambda config: config.update(in_effect=value))
    message = "the manifest is damaged: config / in_effect does not contain values by class and name; restore"
    export_refused(ours, str(ours), message)


def test_the_options_that_the_chosen_class_lacks_are_named(ours):
    for family, lacks in (
        ("gpt2", "norm: rmsnorm (there: layernorm)"),
        ("qwen2", "qkv-bias (use-bias-in-qkv, use-bias-in-attn-linear): false (there: true)"),
    ):
        name = FAMILIES[family].class_name
        export_refused(ours, f"{name} does not have", lacks, "pass --family llama (hf-family", family=family)


def test_a_tokenizer_of_another_kind_or_another_file_is_refused(ours, theirs):
    edit_recorded(ours, lambda config: config.update(vocab_file=str(theirs / "nowhere.json")))
    export_refused(ours, "the tokenizer that ", " records cannot be loaded", "pass --vocab-file")
    tokenizer = Tokenizer.from_file(str(theirs / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.save(str(theirs / "other.json"))
    other = theirs / "other.json"
    export_refused(ours, f"{other} is not the tokenizer that {ours} was trained with", vocab_file=other)
    edit_recorded(
        ours, lambda config: config.update(tokenizer_type="CharLevelTokenizer", vocab_file=None, in_effect={})
    )
    export_refused(
        ours, "the tokenizer CharLevelTokenizer cannot be used in transformers: it is not of the tokenizers"
    )


def test_a_tokenizer_with_more_entries_than_rows_is_not_exported(ours, theirs):
    path = theirs / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens(["one more"])
    tokenizer.save(str(path))
    edit_recorded(ours, lambda config: config.update(in_effect={}))
    for trims in (False, True):
        message = "has 281 entries, but the token embedding only 280 rows"
        export_refused(ours, message, vocab_file=path, trim_vocab=trims)


def test_a_damaged_or_absent_checkpoint_is_refused(ours):
    shard = next(ours.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-4])
    export_refused(ours, shard.name)
    (ours / "manifest.json").unlink()
    export_refused(ours, "manifest.json")


def test_a_folder_with_contents_or_without_permission_is_not_written(tmp_path, theirs, ours, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("contents")
    (tmp_path / "file").write_text("contents")
    for path in (tmp_path / "full", tmp_path / "file"):
        for convert in (lambda output: from_hf(theirs, output), lambda output: to_hf(ours, output)):
            with refusals.refused(ConversionError, "--output"):
                convert(path)
    assert (tmp_path / "full" / "file").read_text() == (tmp_path / "file").read_text() == "contents"
    monkeypatch.setattr(writing.os, "access", lambda *arguments: False)
    import_refused(theirs, f"no write permission for {tmp_path}; pass another --output")


@pytest.mark.parametrize("convert", [import_refused, export_refused])
def test_a_full_disk_is_one_message_and_leaves_nothing(theirs, ours, convert):
    """A limit of the size of files stands for the disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        convert(theirs if convert is import_refused else ours, "cannot write", "File too large", "free space")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_folder_that_a_killed_conversion_left_is_removed_by_the_next(tmp_path):
    process = os.fork()
    if not process:
        with writing.folder_written_aside(tmp_path / "output"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    left = tmp_path / f".output.{process}.converting"
    assert left.is_dir()
    with writing.folder_written_aside(tmp_path / "output") as aside:
        (aside / "file").write_text("contents")
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_two_folders_are_compared_only_if_they_contain_models(tmp_path, theirs, ours):
    with refusals.refused(NeoXError, "not a folder"):
        verify(tmp_path / "nowhere", theirs)
    (tmp_path / "empty").mkdir()
    with refusals.refused(NeoXError, "contains no checkpoint"):
        verify(theirs, theirs.parent / "empty")
    edit_recorded(ours, lambda config: config.update(apply_residual_connection_post_layernorm=True))
    with refusals.refused(ProofError, ours, "apply-residual-connection-"):
        verify(ours, theirs)


def test_a_vocabulary_that_is_shorter_than_the_tokenizer_is_refused(ours, theirs):
    edit(theirs / "config.json", lambda config: config.update(vocab_size=10))
    edit_weights(
        theirs,
        lambda tensors: tensors.update(
            {name: tensors[name][:10].clone() for name in (EMBEDDING, "lm_head.weight")}
        ),
    )
    with refusals.refused(ConversionError, "has 280", "only 10"):
        verify(ours, theirs)


def test_a_path_with_a_line_break_or_a_space_gives_a_configuration_that_is_read(
    tmp_path, theirs, monkeypatch
):
    monkeypatch.setattr(importing, "prove", lambda *arguments, **options: {})
    source = theirs.rename(tmp_path / "a\nnum-layers: 3")
    from_hf(source, tmp_path / "two words")
    text = (tmp_path / "two words" / "model.yml").read_text()
    assert f"--config '{tmp_path / 'two words' / 'model.yml'}'" in text
    assert Checkpoint(tmp_path / "two words" / "global_step0").resolved.config.model.num_layers == 1


def test_hashes_leave_out_what_is_being_written(tmp_path, theirs, monkeypatch):
    monkeypatch.chdir(theirs)
    result = from_hf(Path(), Path("inner"))
    names = ("config", "generation_config", "tokenizer", "tokenizer_config")
    assert set(result["source"]["sha256"]) == {f"{name}.json" for name in names} | {"model.safetensors"}


@pytest.mark.parametrize(("positions", "counts"), [("alibi", True), ("rpe", True), ("rotary", False)])
def test_layer_scaling_counts_where_scores_have_a_bias(positions, counts):
    """It multiplies this bias by the number of the layer."""
    scaled, plain = (
        model_of(flat_values(resolved_from({"pos_emb": positions, SCALES: scales}).config)).model
        for scales in (True, False)
    )
    expected = [f"{SCALES.replace('_', '-')}: 1, 2 (there: 1)"] if counts else []
    assert differences(scaled, plain) == expected

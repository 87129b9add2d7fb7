"""Adapters are exported for PEFT, and change transformers' model as they change ours."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from neox_config.errors import NeoXError
from neox_config.facts.adapters import ADAPTED
from neox_model.checkpoint.adapters import merge_adapters
from neox_model.convert import to_peft as exporting
from neox_model.convert.cli import main
from neox_model.convert.errors import ConversionError, ProofError
from neox_model.convert.families import FAMILIES as TABLES
from neox_model.convert.from_hf import from_hf
from neox_model.convert.lora import proof
from neox_model.convert.reference import load_adapted_model, load_model
from neox_model.convert.to_hf import to_hf
from neox_model.convert.to_peft import to_peft
from support.adapter_files import write_adapters
from support.hf_models import DENSE, random_settings, write_model
from support.refusals import refused, shows

pytestmark = pytest.mark.slow

peft = pytest.importorskip("peft")

SHARED = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
HEADS = {"gpt_neox": {"num_attention_heads": 4, "hidden_size": 32}, "gpt2": {"n_head": 4, "n_embd": 32}}
MATRICES = {"phi3": ("qkv", "dense", "down")}


def settings_of(family):
    return random_settings(family, 3) | HEADS.get(family, SHARED)


def imported(folder, family):
    write_model(folder / "theirs", family, settings_of(family))
    from_hf(folder / "theirs", folder / "base")
    return folder / "base" / "global_step0"


@pytest.mark.parametrize("family", DENSE)
def test_peft_computes_what_the_merged_model_computes(tmp_path, family):
    base = imported(tmp_path, family)
    if family == "phi3":
        joined = write_adapters(base, tmp_path / "joined")
        with pytest.raises(ConversionError, match=r"mlp\.gate_up_proj"):
            to_peft(joined, tmp_path / "theirs", tmp_path / "peft")
    adapters = write_adapters(base, tmp_path / "adapters", matrices=MATRICES.get(family, ADAPTED))
    with warnings.catch_warnings():
        # No warning about peft or transformers is shown to the user of the command.
        warnings.simplefilter("error", FutureWarning)
        result = to_peft(adapters, tmp_path / "theirs", tmp_path / "peft")
    assert max(result["largest_differences"].values()) < 1e-5
    assert {"real text", "left-padded batch", "cached"} <= result["largest_differences"].keys()
    assert result == json.loads((tmp_path / "peft" / "verification.json").read_text())
    # As the Trainer of transformers writes them with adapters.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "peft" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    table = TABLES[family]
    adapted = load_adapted_model(tmp_path / "theirs", table, tmp_path / "peft").double()
    plain = load_model(tmp_path / "theirs", table).double()
    merged = merge_adapters(adapters, tmp_path / "merged")
    to_hf(merged, tmp_path / "exported", family=family)
    ours = load_model(tmp_path / "exported", table).double()
    tokens = torch.randint(0, 280, (2, 16), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        theirs, expected, unchanged = (model(tokens).logits for model in (adapted, ours, plain))
    assert (theirs - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (theirs - unchanged).abs().max() > 0.01 * expected.abs().max()


def swapped_rows(form):
    """Return a form with the rows of B rolled by one."""

    class Rolled:
        is_transposed = form.is_transposed
        is_same = form.is_same
        by_entry = form.by_entry
        to_theirs = staticmethod(form.to_theirs)
        to_ours = staticmethod(form.to_ours)

        def rows_to_theirs(self, matrix, attention):
            return form.rows_to_theirs(matrix.roll(1, 0), attention)

    return Rolled()


def with_exchanged_modules(family, one, other):
    names = {row.ours: row for row in family.in_layer}
    exchanged = {
        one: replace(names[one], theirs=names[other].theirs),
        other: replace(names[other], theirs=names[one].theirs),
    }
    return replace(family, in_layer=tuple(exchanged.get(row.ours, row) for row in family.in_layer))


def test_wrong_adapters_are_not_written(tmp_path, monkeypatch):
    base = imported(tmp_path, "llama")
    adapters = write_adapters(base, tmp_path / "adapters")
    table = TABLES["llama"]
    qkv = next(row for row in table.in_layer if row.ours == "attention.qkv")
    faults = {
        "rows of B": replace(
            table,
            in_layer=tuple(
                replace(row, form=swapped_rows(row.form)) if row is qkv else row for row in table.in_layer
            ),
        ),
        "gate and up": with_exchanged_modules(table, "mlp.gate", "mlp.up"),
    }
    for what, fault in faults.items():
        with monkeypatch.context() as patch:
            patch.setattr(proof, "family_of_config", lambda config, fault=fault: fault)
            with pytest.raises(NeoXError, match=r"not the same model|are not those of"):
                to_peft(adapters, tmp_path / "theirs", tmp_path / "peft")
        assert not (tmp_path / "peft").exists(), what
    settings = exporting.Exported.settings
    for name, value in (
        *(("r", 2), ("lora_alpha", 8), ("lora_dropout", 0.2), ("use_rslora", True), ("use_dora", True)),
        *(("target_modules", ["q_proj"]), ("alpha_pattern", {"q_proj": 3}), ("bias", "all")),
    ):
        with monkeypatch.context() as patch:
            changed = lambda self, model, name=name, value=value: settings(self, model) | {name: value}  # noqa: E731
            patch.setattr(exporting.Exported, "settings", changed)
            with pytest.raises(NeoXError):
                to_peft(adapters, tmp_path / "theirs", tmp_path / "peft")
        assert not (tmp_path / "peft").exists(), name


@pytest.mark.parametrize("side", ["lora_A", "lora_B"])
def test_every_value_is_compared(tmp_path, monkeypatch, side):
    """One value of 864 that changes by its last bit."""
    base = imported(tmp_path, "gpt_neox")
    adapters = write_adapters(base, tmp_path / "adapters")
    write = exporting.write_weights

    def damaged(folder, *arguments, **options):
        write(folder, *arguments, **options)
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        name = next(name for name in sorted(tensors) if side in name)
        tensors[name][-1, -1] = torch.nextafter(tensors[name][-1, -1], torch.tensor(1.0))
        save_file(tensors, path, metadata={"format": "pt"})

    monkeypatch.setattr(exporting, "write_weights", damaged)
    with refused(ProofError, f"{side}.weight"):
        to_peft(adapters, tmp_path / "theirs", tmp_path / "peft")
    assert not (tmp_path / "peft").exists()


def test_the_whole_base_and_its_tokenizer_are_compared(tmp_path):
    base = imported(tmp_path, "gpt_neox")
    adapters = write_adapters(base, tmp_path / "adapters")
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(path)
    name = "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"
    changed = tensors[name].clone()
    changed[0, 0] = torch.nextafter(changed[0, 0], torch.tensor(1.0))
    save_file(tensors | {name: changed}, path, metadata={"format": "pt"})
    with refused(ConversionError, "1", "dense_h_to_4h.weight"):
        to_peft(adapters, tmp_path / "theirs", tmp_path / "peft")
    save_file(tensors, path, metadata={"format": "pt"})
    tokenizer = tmp_path / "theirs" / "tokenizer.json"
    contents = json.loads(tokenizer.read_text())
    contents["model"]["merges"] = contents["model"]["merges"][1:]
    tokenizer.write_text(json.dumps(contents))
    with refused(ConversionError, "the tokenizers encode"):
        to_peft(adapters, tmp_path / "theirs", tmp_path / "peft")


def test_what_is_not_the_base_is_refused_in_one_message(tmp_path):
    base, theirs = imported(tmp_path, "gpt_neox"), tmp_path / "theirs"
    adapters = write_adapters(base, tmp_path / "adapters", matrices=("qkv", "down"))
    write_model(tmp_path / "other", "gpt_neox", settings_of("gpt_neox"), seed=1)
    write_model(tmp_path / "larger", "gpt_neox", settings_of("gpt_neox") | {"num_hidden_layers": 4})

    def message(*arguments):
        command = ["to-peft", "--output", str(tmp_path / "peft"), *map(str, arguments)]
        done = CliRunner().invoke(main, command)
        assert done.exit_code != 0
        assert not (tmp_path / "peft").exists()
        return done.output

    wrong = message("--load", adapters, "--model", tmp_path / "other")
    assert shows(wrong, base, tmp_path / "other")
    assert shows(wrong, base, "--model")
    assert shows(wrong, "neox-convert", "to-hf", "--load", base, "--output", "NEW_FOLDER")
    (theirs / "tokenizer.json").rename(tmp_path / "kept.json")
    unreadable = message("--load", adapters, "--model", theirs)
    assert shows(unreadable, "load the tokenizer")
    assert "not the same model" not in unreadable
    (tmp_path / "kept.json").rename(theirs / "tokenizer.json")
    assert "num-layers" in message("--load", adapters, "--model", tmp_path / "larger")
    assert shows(message("--load", base, "--model", tmp_path / "theirs"), "checkpoint of adapters")
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    assert shows(message("--load", adapters, "--model", tmp_path / "theirs"), "--base")
    places = {
        "--load": adapters,
        "--model": tmp_path / "theirs",
        "--base": moved,
        "--vocab-file": moved / "tokenizer.json",
        "--output": tmp_path / "peft",
    }
    done = CliRunner().invoke(main, ["to-peft", *(str(each) for pair in places.items() for each in pair)])
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["attention.query_key_value", "mlp.dense_4h_to_h"]
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (3, 7, False)

"""Adapters of PEFT become adapters of ours, and the same adapters again."""

import json
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from neox_config import load_config
from neox_config.schema.sections.adapters import AdaptersSection
from neox_model.checkpoint.adapters import Adapters
from neox_model.checkpoint.base import recorded_base
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.errors import CheckpointError, DamagedManifestError
from neox_model.convert import from_hf as importing
from neox_model.convert.checkpoints import Checkpoint
from neox_model.convert.cli import main
from neox_model.convert.errors import ConversionError, ProofError
from neox_model.convert.from_peft import from_peft
from neox_model.convert.lora.imported import Imported
from neox_model.convert.lora.packing import Packing
from neox_model.convert.to_peft import to_peft
from support.adapter_files import write_adapters
from support.checkpoint_edits import edit_manifest
from support.hf_models import DENSE, random_settings, write_model
from support.refusals import refused, shows

pytestmark = pytest.mark.slow

peft = pytest.importorskip("peft")

SHARED = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {
    "gpt_neox": {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 2},
    "gpt2": {"n_head": 4, "n_embd": 32, "n_layer": 2},
}
ATTENTION = {"gpt_neox": ["query_key_value"], "gpt2": ["attn.c_attn"]}


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Return a function that writes a model of transformers and its checkpoint."""

    def write(family="llama", seed=3, **settings):
        theirs = random_settings(family, seed) | HEADS.get(family, SHARED) | settings
        write_model(tmp_path / "theirs", family, theirs)
        with monkeypatch.context() as patch:  # Proven by its own tests.
            patch.setattr(importing, "prove", lambda *arguments, **options: {})
            importing.from_hf(tmp_path / "theirs", tmp_path / "base")
        return tmp_path / "base" / "global_step0"

    return write


def write_peft(folder, *, dtype=torch.float32, seed=1, **options):
    """Let peft write random adapters of the model in `folder / "theirs"`."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "theirs", dtype=torch.float32)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", **{"r": 2, "lora_alpha": 5, "lora_dropout": 0.1, **options}
    )
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder / "adapters")
    path = folder / "adapters" / "adapter_model.safetensors"
    if dtype != torch.float32:
        tensors = {name: values.to(dtype) for name, values in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    return folder / "adapters"


def assert_same_files(one, other):
    """Compare tensors bit for bit, and the options that have a meaning."""
    theirs, ours = (load_file(each / "adapter_model.safetensors") for each in (one, other))
    assert theirs.keys() == ours.keys()
    for name, values in theirs.items():
        assert values.dtype == ours[name].dtype
        assert torch.equal(values, ours[name]), name
    options = [json.loads((each / "adapter_config.json").read_text()) for each in (one, other)]
    for name in ("r", "lora_alpha", "lora_dropout", "fan_in_fan_out", "peft_type", "task_type", "bias"):
        assert options[0][name] == options[1][name]


@pytest.mark.parametrize(
    ("family", "modules", "factor"),
    [
        *((family, "all-linear", 1 if family in ATTENTION else 3) for family in DENSE if family != "phi3"),
        ("phi3", ["qkv_proj", "down_proj"], 1),
        ("llama", ["q_proj", "v_proj"], 2),
        ("llama", ["v_proj", "down_proj"], 1),
        ("gpt2", ["c_attn"], 1),
        ("gpt_neox", ["query_key_value", "dense_4h_to_h"], 1),
    ],
)
def test_adapters_come_back_bit_for_bit(tmp_path, base, family, modules, factor):
    base(family)
    adapters = write_peft(tmp_path, target_modules=modules, fan_in_fan_out=family == "gpt2")
    result = from_peft(adapters, tmp_path / "ours", base=tmp_path / "base" / "global_step0")
    assert max(result["largest_differences"].values()) < 1e-5
    assert {"real text", "left-padded batch", "cached"} <= result["largest_differences"].keys()
    ours = Adapters(tmp_path / "ours" / "global_step0")
    assert ours.manifest.config["lora_rank"] == 2 * factor
    assert ours.scale == 2.5
    to_peft(ours.folder, tmp_path / "theirs", tmp_path / "again")
    assert_same_files(adapters, tmp_path / "again")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_of_16_bits_keep_their_bits(tmp_path, base, dtype):
    base()
    adapters = write_peft(tmp_path, target_modules=["q_proj", "k_proj", "up_proj"], dtype=dtype)
    from_peft(adapters, tmp_path / "ours", base=tmp_path / "base" / "global_step0")
    to_peft(tmp_path / "ours" / "global_step0", tmp_path / "theirs", tmp_path / "again")
    assert_same_files(adapters, tmp_path / "again")


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_our_own_adapters_come_back_bit_for_bit(tmp_path, base, family):
    folder = base(family)
    ours = write_adapters(folder, tmp_path / "adapters")
    to_peft(ours, tmp_path / "theirs", tmp_path / "peft")
    from_peft(tmp_path / "peft", tmp_path / "again", base=folder)
    one, other = Adapters(ours), Adapters(tmp_path / "again" / "global_step0")
    assert one.matrices == other.matrices
    for name in one.matrices:
        assert all(torch.equal(a, b) for a, b in zip(one.pair(name), other.pair(name), strict=True)), name
    names = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "base")
    same = [{name: each.manifest.config[name] for name in names} for each in (one, other)]
    expected = same[0] | {"lora_target_modules": same[1]["lora_target_modules"]}
    assert expected == same[1]


def test_the_configuration_trains_what_was_imported(tmp_path, base):
    edit_manifest(base(), "config", {"stop_tokens": [3]})
    adapters = write_peft(tmp_path, target_modules=["q_proj", "v_proj", "gate_proj"])
    arguments = ["from-peft", adapters, "--base", tmp_path / "base", "--output", tmp_path / "ours"]
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    assert "LoRA of LlamaForCausalLM" in done.output
    config = load_config([tmp_path / "ours" / "model.yml"])
    section = config.adapters
    assert (section.lora_rank, section.lora_alpha, section.lora_dropout) == (4, 10.0, 0.1)
    assert section.lora_target_modules == ("qkv", "gate")
    assert section.lora_base == str(tmp_path / "base")
    assert (config.checkpoint.load, config.checkpoint.finetune) == (str(tmp_path / "ours"), True)
    whole = load_config([tmp_path / "base" / "model.yml"])
    assert (config.model, config.attention) == (whole.model, whole.attention)
    assert config.tokenizer == whole.tokenizer
    recorded = Manifest.read(tmp_path / "ours" / "global_step0").config
    assert recorded["peft"] == {"rank": 2, "alpha": 5, "stacked": {"qkv": [0, 2]}}
    assert (recorded["stop_tokens"], config.generation.stop_tokens) == ([3], (3,))


def test_a_base_is_found_from_any_working_directory(tmp_path, base, monkeypatch):
    folder = base()
    adapters = write_peft(tmp_path, target_modules=["q_proj"])
    change(adapters, task_type=None, auto_mapping={"base_model_class": "LlamaForCausalLM"})
    monkeypatch.chdir(folder)
    (adapters / "checkpoint-4").mkdir()
    (adapters / "checkpoint-4" / "optimizer.pt").touch()
    result = from_peft(adapters, tmp_path / "ours", base=Path())
    assert result["source"]["sha256"].keys() == {"adapter_config.json", "adapter_model.safetensors"}
    monkeypatch.chdir(tmp_path)
    assert load_config([tmp_path / "ours" / "model.yml"]).adapters.lora_base == str(folder.parent)
    assert recorded_base(Adapters(tmp_path / "ours" / "global_step0").base) == folder
    renamed = folder.rename(tmp_path / "renamed")
    with refused(CheckpointError, "global_step0"):
        from_peft(adapters, tmp_path / "other", base=renamed)
    assert not (tmp_path / "other").exists()


def test_a_name_in_the_hub_of_models_is_not_made_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vocab.json").touch()
    section = SimpleNamespace(tokenizer_type="HFGPT2Tokenizer", vocab_file="org/name", merge_file=None)
    checkpoint = SimpleNamespace(resolved=SimpleNamespace(config=SimpleNamespace(tokenizer=section)))
    found = Checkpoint.tokenizer_settings(checkpoint, None, None)
    assert found == {"tokenizer-type": "HFGPT2Tokenizer", "vocab-file": "org/name"}
    found = Checkpoint.tokenizer_settings(checkpoint, Path("vocab.json"), None)
    assert found["vocab-file"] == str(tmp_path / "vocab.json")


def change(adapters, **options):
    path = adapters / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


def test_a_record_of_other_adapters_is_refused():
    ours, right = (
        AdaptersSection(lora_rank=4, lora_alpha=10.0),
        {"rank": 2, "alpha": 5, "stacked": {"qkv": [0, 2]}},
    )
    assert Packing.of(ours, right) == Packing(2, 5, {"qkv": (0, 2)})
    for record in (
        "x",
        {},
        right | {"rank": 0},
        right | {"alpha": 4},
        right | {"stacked": {"qkv": [0, 1, 2]}},
    ):
        with refused(DamagedManifestError, "lora_rank", "lora_alpha"):
            Packing.of(ours, record)


def test_what_ours_cannot_have_is_refused(tmp_path, base):
    folder = base()
    adapters = write_peft(tmp_path, target_modules=["q_proj", "up_proj"])
    original = (adapters / "adapter_config.json").read_text()
    path = adapters / "adapter_model.safetensors"
    tensors = load_file(path)

    def message(code=2, **options):
        change(adapters, **options)
        arguments = ["from-peft", adapters, "--base", folder, "--output", tmp_path / "ours"]
        done = CliRunner().invoke(main, [*map(str, arguments)])
        (adapters / "adapter_config.json").write_text(original)
        assert (done.exit_code, (tmp_path / "ours").exists()) == (code, False), done.output
        return done.output

    assert shows(message(use_rslora=True), "use_rslora", "neox-model's")
    assert "use_dora: True" in message(use_dora=True)
    assert "bias: 'all'" in message(bias="all")
    assert "modules_to_save: ['lm_head']" in message(modules_to_save=["lm_head"])
    assert "rank_pattern: {'q_proj': 4}" in message(rank_pattern={"q_proj": 4})
    assert "layers_to_transform: [0]" in message(layers_to_transform=[0])
    assert "some_new_option: 3" in message(some_new_option=3)
    assert "peft_type: 'IA3'" in message(peft_type="IA3")
    assert "init_lora_weights: 'pissa'" in message(init_lora_weights="pissa")
    assert shows(message(r=0), "0", "lora_alpha", "5")
    assert "lora_alpha: -1" in message(lora_alpha=-1)
    assert "fan_in_fan_out: True" in message(fan_in_fan_out=True)
    assert shows(message(r=3), "2", "32", "rank 3")
    assert shows(message(base_model_name_or_path="org/model"), "a model here")
    other = tmp_path / "other"
    write_model(other, "llama", random_settings("llama", 3) | SHARED, seed=1)
    wrong = message(base_model_name_or_path=str(other))
    assert shows(wrong, folder, other)
    assert shows(wrong, "--base", "neox-convert", "from-hf", other, "--output", "NEW_FOLDER")

    def of(changed):
        save_file(changed, path, metadata={"format": "pt"})
        return message()

    first = sorted(tensors)[0]
    assert "without" in of({name: each for name, each in tensors.items() if name != first})
    head = {f"base_model.model.lm_head.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    assert "lm_head.lora_A.weight, base_model.model.lm_head" in of(tensors | head)
    in_one = {name: each for name, each in tensors.items() if "layers.0." in name or "q_proj" in name}
    assert shows(of(in_one), "neox-model")
    assert shows(of(tensors | {first: tensors[first].half()}), "float16", "float32", "float32")
    assert shows(of({name: each.double() for name, each in tensors.items()}), "float64", "float32")
    assert "not finite" in of(tensors | {first: tensors[first] * float("inf")})
    save_file(tensors, path, metadata={"format": "pt"})
    assert shows(message(code=1, target_modules=["q_proj"]), "reads other tensors")
    path.rename(adapters / "adapter_model.bin")
    assert "contains no adapter_model.safetensors" in message()


@pytest.mark.parametrize("wrong", [".adapter.a", ".adapter.b", "places"])
def test_a_wrong_stack_is_found_before_anything_is_written(tmp_path, base, monkeypatch, wrong):
    folder = base()
    adapters = write_peft(tmp_path, target_modules=["q_proj", "k_proj", "v_proj"])
    places, values = Packing.places, Imported.values
    if wrong == "places":
        # A is made with the places, and then B.
        steps = cycle((1, -1))
        monkeypatch.setattr(Packing, "places", lambda self, *given: places(self, *given)[:: next(steps)])
    else:

        def rolled(self, name):
            return (each.roll(1, 0) if name.endswith(wrong) else each for each in values(self, name))

        monkeypatch.setattr(Imported, "values", rolled)
    with pytest.raises((ProofError, ConversionError), match=r"not the same model|differs|are not where"):
        from_peft(adapters, tmp_path / "ours", base=folder)
    assert not (tmp_path / "ours").exists()

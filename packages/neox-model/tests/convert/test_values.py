"""What is stored but does not change logits is compared too."""

import json
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from neox_config import load_config, resolve
from neox_config.spec.write_model import settings_of
from neox_model.convert import from_hf as importing
from neox_model.convert.differences import simplest
from neox_model.convert.errors import ProofError
from neox_model.convert.families import FAMILIES as TABLES
from neox_model.convert.verify import verify
from neox_model.convert.yaml_file import write_settings
from support.hf_models import ENTRIES, FAMILIES, random_settings, write_model
from support.refusals import refused

REPOSITORY = Path(__file__).parents[4]


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Return a function that writes a model of transformers and its checkpoint."""

    def write(family, settings):
        theirs = write_model(tmp_path / "theirs", family, {**settings, "vocab_size": ENTRIES})
        with monkeypatch.context() as patch:
            patch.setattr(importing, "prove", lambda *arguments, **options: {})
            importing.from_hf(theirs, tmp_path / "ours")
        return tmp_path / "ours", theirs

    return write


def add(folder, name, place):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name][place] += 1.0
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_bias_of_keys_without_effect_is_compared(pair):
    """Scores of a query all grow by the same number, which its softmax removes."""
    ours, theirs = pair("gpt2", {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 8})
    add(theirs, "transformer.h.0.attn.c_attn.bias", torch.arange(8, 16))
    with refused(ProofError, "8", "transformer.h.0.attn.c_attn.bias"):
        verify(ours, theirs)


@pytest.mark.parametrize("place", [0, 2_049, 2_099])
def test_every_learned_position_is_compared(pair, place):
    ours, theirs = pair("gpt2", {"n_embd": 4, "n_head": 1, "n_layer": 1, "n_positions": 2_100})
    add(theirs, "transformer.wpe.weight", (place, 0))
    with refused(ProofError, "1", "transformer.wpe.weight"):
        verify(ours, theirs)


def test_an_option_without_effect_on_this_model_is_compared(pair):
    """The only pair of channels that is rotated turns by one radian per token, whatever the base is."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    ours, theirs = pair("gpt_neox", {**sizes, "max_position_embeddings": 16, "rope_parameters": rope})
    config = json.loads((theirs / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0
    (theirs / "config.json").write_text(json.dumps(config))
    message = r"is of another model than .*: rotary-emb-base: 10,?000(\.0)? \(there: 500(\.0)?\)"
    with pytest.raises(ProofError, match=message):
        verify(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_our_settings_give_the_model_back(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    for seed in range(1, 11):
        kind = getattr(transformers, TABLES[family].class_name).config_class
        kind(**random_settings(family, seed)).save_pretrained(tmp_path)
        spec = TABLES[family].read(json.loads((tmp_path / "config.json").read_text()))
        path = tmp_path / "model.yml"
        settings = settings_of(spec) | {"precision": "fp32", "tokenizer-type": "CharLevelTokenizer"}
        write_settings(path, settings, source=tmp_path, output=Path("/a/$model"))
        config = load_config([path])
        assert config.checkpoint.load == "/a/$model"
        assert simplest(resolve(config, devices=1).model) == spec
        assert TABLES[family].read(TABLES[family].write(spec)) == spec


def test_parameters_are_written_in_the_order_of_files_with_what_differs_from_the_default():
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    more = {"intermediate_size": 20, "max_position_embeddings": 32, "rope_theta": 500.0}
    config = {"model_type": "qwen2", **sizes, **windows, **more, "rope_scaling": scaling}
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": 1.138629436111989}
    expected = {
        "num-layers": 2,
        "hidden-size": 8,
        "num-attention-heads": 2,
        "mlp-width": 20,
        "max-position-embeddings": 32,
        "seq-length": 32,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "rms-norm-epsilon": 1e-06,
        "pos-emb": "rotary",
        "no-weight-tying": True,
        "use-bias-in-attn-linear": False,
        "use-bias-in-mlp": False,
        "use-bias-in-qkv": True,
        "num-kv-heads": 1,
        "rotary-pct": 1.0,
        "rotary-emb-base": 500,
        "rotary-scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, **yarn},
        "attention-config": ["global", "sliding"],
        "attention-kinds": {"sliding": {"sliding-window-width": 5}},
        "make-vocab-size-divisible-by": 1,
    }
    assert json.dumps(settings_of(TABLES["qwen2"].read(config))) == json.dumps(expected)


def test_the_configuration_of_an_imported_model_trains_as_its_comment_states(pair):
    ours, _ = pair("llama", random_settings("llama", 1))
    comment = (ours / "model.yml").read_text()
    (line,) = [line for line in comment.splitlines() if "--set data-path=PREFIX" in line]
    words = shlex.split(line.removeprefix("#"))
    files = [Path(value) for word, value in pairwise(words) if word == "--config"]
    overrides = [value for word, value in pairwise(words) if word == "--set"]
    config = load_config(files, overrides=overrides)
    resolve(config, devices=1)
    assert config.checkpoint.save == "FOLDER"
    assert config.checkpoint.save_interval_minutes == 30
    assert config.logging.log_interval == 10
    for more in ([], ["train-iters=60"], ["train-iters=null", "train-epochs=1"]):
        changed = load_config(files, overrides=[*overrides, *more])
        assert not [note for note in changed.notices if "interval" in note.name]
    # generate, evaluate and serve read the file without `save`.
    assert not load_config(files).notices


def test_the_documented_cut_before_the_training_keeps_what_describes_the_model(tmp_path):
    """The recipes of finetuning.md make `base.yml` with sed."""
    described = {
        "num-layers": 2,
        "vocab-file": "tokenizer.json",
        "lora-rank": 4,
        "stop-tokens": [2],
        "hidden-dropout": 0.0,
    }
    write_settings(
        tmp_path / "model.yml", {**described, "precision": "fp32"}, source=tmp_path, output=tmp_path
    )
    recipe = (REPOSITORY / "docs" / "finetuning.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\$ (sed .*imported/model.yml) > base.yml$", recipe, re.MULTILINE)
    words = [word.replace("imported", str(tmp_path)) for word in shlex.split(command)]
    cut = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert yaml.safe_load(cut) == described

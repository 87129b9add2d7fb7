"""Quantized weights of gpt-oss, and tensors of its experts that were changed."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from neox_model.convert import from_hf as importing
from neox_model.convert.errors import ConversionError, ProofError
from neox_model.convert.families import FAMILIES
from neox_model.convert.families.gpt_oss import GPT_OSS
from neox_model.convert.from_hf import open_hf
from neox_model.convert.verify import verify
from support.hf_models import plain_settings, write_model
from support.refusals import refused

# Blocks of 32 numbers of 4 bits share a scale.
SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 32}


def quantized(folder):
    """Write a model with weights of experts as they are published."""
    write_model(folder, "gpt_oss", plain_settings("gpt_oss") | SIZES, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [each for each in tensors if each.endswith("_proj") and ".experts." in each]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (experts, outputs, inputs // 32, 16), generator=generator
        ).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 124, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(config))
    return path, config


def test_quantized_weights_are_refused_with_the_command_that_unpacks_them(tmp_path):
    """The command is run, and what it writes is read."""
    path, config = quantized(tmp_path / "packed")
    with refused(ConversionError, "MXFP4", "dequantize=True") as caught:
        open_hf(tmp_path / "packed")
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with refused(ConversionError, "MXFP4", "dequantize=True"):
        open_hf(tmp_path / "packed")
    config["quantization_config"] = {"quant_method": "mxfp4"}
    path.write_text(json.dumps(config))
    command = re.search(r"python -c .*OUTPUT$", str(caught.value)).group()
    command = command.replace("FOLDER", str(tmp_path / "packed")).replace("OUTPUT", str(tmp_path / "plain"))
    command = command.replace("python", shlex.quote(sys.executable), 1)
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = open_hf(tmp_path / "plain")
    assert found.family is GPT_OSS
    assert found.reader.precision == "bf16"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("mlp.experts.gate_up_proj", (1, 3, 6)),
        ("mlp.experts.gate_up_proj_bias", (2, 7)),
        ("mlp.experts.down_proj_bias", (3, 1)),
        ("mlp.router.bias", (0,)),
        ("self_attn.sinks", (1,)),
    ],
)
def test_a_changed_tensor_is_found(tmp_path, monkeypatch, name, place):
    theirs = write_model(tmp_path / "theirs", "gpt_oss", plain_settings("gpt_oss"))
    with monkeypatch.context() as patch:
        patch.setattr(importing, "prove", lambda *arguments, **options: {})
        importing.from_hf(theirs, tmp_path / "ours")
    tensors = load_file(theirs / "model.safetensors")
    tensors[f"model.layers.0.{name}"][place] *= 1.001
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    with refused(ProofError):
        verify(tmp_path / "ours", theirs)


def test_gate_and_up_are_the_even_and_the_odd_columns():
    """Without the order of the class, the two would be exchanged, or be halves."""
    family = FAMILIES["gpt_oss"]
    whole, parts = family.joined_parts("model.layers.3.mlp.experts.up_proj_bias")
    assert whole == "model.layers.3.mlp.experts.gate_up_proj_bias"
    assert [each.rpartition(".")[2] for each in parts] == ["gate_proj_bias", "up_proj_bias"]
    assert family.has_columns_in_turn(whole)
    assert not family.has_columns_in_turn("model.layers.3.mlp.experts.down_proj")

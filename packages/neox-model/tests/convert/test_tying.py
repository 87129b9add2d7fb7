"""The output projection is tied as transformers ties it: where config.json states it, by what is stored."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from neox_config import load_config
from neox_model.api.model import load_model
from neox_model.convert.errors import ConversionError
from neox_model.convert.families import FAMILIES
from neox_model.convert.from_hf import from_hf
from neox_model.convert.to_hf import to_hf
from neox_model.convert.verify import verify
from support.hf_models import plain_settings, write_model
from support.refusals import shows

NAMES = {
    "gpt_neox": ("gpt_neox.embed_in.weight", "embed_out.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "opt": ("model.decoder.embed_tokens.weight", "lm_head.weight"),
}


def of_other_values(embedding, head):
    return {embedding: lambda values: values, head: lambda values: values.flip(0).contiguous()}


def of_one_other_value(embedding, head):
    """The last value of many chunks' worth of rows differs."""
    return {embedding: lambda values: values, head: lambda values: torch.cat([values[:-1], values[-1:] * 2])}


def as_copy(embedding, head):
    return {embedding: lambda values: values, head: torch.clone}


def alone(embedding, head):
    return {head: lambda values: values}


def neither(embedding, head):
    return {embedding: lambda values: values}


def write(folder, family, stored, *, tied=True):
    """Write a model whose config.json states `tied`, with what `stored` makes of its tied embedding."""
    write_model(folder, family, plain_settings(family) | {"tie_word_embeddings": True})
    embedding, head = NAMES.get(family, ("model.embed_tokens.weight", "lm_head.weight"))
    tensors = load_file(folder / "model.safetensors")
    values = tensors.pop(embedding)
    tensors |= {name: make(values) for name, make in stored(embedding, head).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    return folder


def logits_of_transformers(folder, ids):
    import transformers  # Takes seconds.

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("stored", "is_tied"),
    [(of_other_values, False), (of_one_other_value, False), (as_copy, True), (alone, True), (neither, True)],
)
def test_logits_are_those_of_transformers_whatever_is_stored(tmp_path, family, stored, is_tied):
    folder, ids = write(tmp_path / "theirs", family, stored), list(range(5, 21))
    model = load_model(folder)
    assert model.config.model.no_weight_tying is not is_tied
    expected = logits_of_transformers(folder, ids)
    assert float((model.logits(ids) - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_a_head_that_is_not_tied_is_reported(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "neox_model")
    load_model(write(tmp_path / "tied", "llama", as_copy))
    assert caplog.messages == []
    load_model(write(tmp_path / "untied", "llama", of_other_values))
    assert shows(caplog.text, "config.json", "tie_word_embeddings", "lm_head.weight")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_older_files_of_torch_are_read_likewise(tmp_path, family):
    folder, ids = write(tmp_path / "theirs", family, alone), list(range(5, 21))
    expected = logits_of_transformers(folder, ids)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if family == "gpt2":
        tensors = {name.removeprefix("transformer."): values for name, values in tensors.items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    assert float((load_model(folder).logits(ids) - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_alone_of_a_model_that_is_not_tied_is_refused(tmp_path, family):
    """The class of transformers would train its embedding from random values."""
    folder = write(tmp_path / "theirs", family, alone, tied=False)
    with pytest.raises(ConversionError, match=r"does not contain .*(embed_|wte)"):
        load_model(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("stored", "is_tied"), [(of_other_values, False), (alone, True), (as_copy, True)])
def test_round_trips_are_proven_and_keep_what_is_tied(tmp_path, family, stored, is_tied):
    folder = write(tmp_path / "theirs", family, stored)
    from_hf(folder, tmp_path / "ours")
    assert load_config([tmp_path / "ours" / "model.yml"]).model.no_weight_tying is not is_tied
    to_hf(tmp_path / "ours" / "global_step0", tmp_path / "back")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert back["tie_word_embeddings"] is is_tied
    assert verify(folder, tmp_path / "back")["verdict"] == "equal"
    assert verify(folder, tmp_path / "ours")["verdict"] == "equal"

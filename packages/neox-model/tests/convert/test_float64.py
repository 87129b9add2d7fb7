"""In float64 both programs agree to 1e-9, if norms, rotary tables and softmax are computed in it too."""

from functools import partial

import pytest
import torch

from neox_model.convert import from_hf as importing
from neox_model.convert.checkpoints import Checkpoint, build_sequential, load_into
from neox_model.convert.families import FAMILIES as TABLES
from neox_model.convert.reference import load_model
from support.hf_models import FAMILIES, random_settings, write_model

pytestmark = pytest.mark.slow


@pytest.fixture
def wide(monkeypatch):
    """Compute in float64 whatever asks for float32."""

    def in_float64(function, *arguments, **options):
        arguments = [torch.float64 if each is torch.float32 else each for each in arguments]
        options = {name: torch.float64 if each is torch.float32 else each for name, each in options.items()}
        return function(*arguments, **options)

    def method(function):
        return lambda self, *arguments, **options: in_float64(partial(function, self), *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "to", method(torch.Tensor.to))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "arange", partial(in_float64, torch.arange))
    monkeypatch.setattr(torch.nn.functional, "softmax", partial(in_float64, torch.nn.functional.softmax))


@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_to_nine_digits(tmp_path, monkeypatch, request, family, seed):
    write_model(tmp_path / "theirs", family, random_settings(family, seed), seed=seed)
    monkeypatch.setattr(importing, "prove", lambda *arguments, **options: {})
    importing.from_hf(tmp_path / "theirs", tmp_path / "ours")
    checkpoint = Checkpoint(tmp_path / "ours" / "global_step0")
    request.getfixturevalue("wide")
    theirs = load_model(tmp_path / "theirs", TABLES[family]).double()
    for module in theirs.modules():
        if hasattr(module, "embed_scale"):  # It was rounded to float32.
            module.embed_scale = torch.tensor(theirs.config.hidden_size**0.5, dtype=torch.float64)
    ours = build_sequential(checkpoint.model, checkpoint.resolved.run, checkpoint.vocab_size)
    ours = ours.double()
    load_into(ours, checkpoint, torch.float64)
    tokens = torch.randint(0, checkpoint.vocab_size, (2, 16), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        mine, expected = ours(tokens), theirs(tokens, use_cache=False).logits
    assert mine.dtype == expected.dtype == torch.float64
    assert float((mine - expected).abs().max()) <= 1e-9 * float(expected.abs().max())

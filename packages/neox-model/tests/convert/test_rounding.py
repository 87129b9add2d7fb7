"""Rounding that a model multiplies is no difference between two programs, and hides none."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from neox_model.convert.errors import ProofError
from neox_model.convert.from_hf import from_hf
from neox_model.convert.proof import whole
from neox_model.convert.proof.comparison import Figures
from support.hf_models import random_settings, write_model
from support.refusals import refused


@pytest.mark.parametrize(
    ("rounding", "largest"), [(1e-6, 1e-5), (1e-5, 4e-5), (1.0, 1e-3), (math.inf, 1e-3), (math.nan, 1e-5)]
)
def test_a_difference_of_four_roundings_is_none(rounding, largest):
    one = torch.ones(2, dtype=torch.float64)
    figures = Figures()
    figures.compare("a", one + 0.99 * largest, one, exact=lambda: one + 0.99 * largest - rounding)
    for difference in (1.01 * largest, math.inf, math.nan):
        with refused(ProofError, "the same model"):
            figures.compare("a", one + difference, one, exact=lambda: one + 1.01 * largest - rounding)


def test_a_model_that_multiplies_rounding_is_proven_and_a_difference_in_it_is_found(tmp_path, monkeypatch):
    """Its scores of attention are in the hundreds: logits in float32 have five digits."""
    theirs = write_model(tmp_path / "theirs", "gpt_neox", random_settings("gpt_neox", 1), seed=1)
    weights = load_file(theirs / "model.safetensors")
    weights = {name: value * (16 if value.dim() == 2 else 1) for name, value in weights.items()}
    save_file(weights, theirs / "model.safetensors", metadata={"format": "pt"})
    result = from_hf(theirs, tmp_path / "ours")
    # CPUs differ in their rounding: 5e-5 on one, 4e-4 on another.
    assert max(result["largest_differences"].values()) < 1e-3
    load = whole.load_model

    def changed(*arguments):
        model = load(*arguments)
        model.gpt_neox.final_layer_norm.weight.data *= 1.001
        return model

    monkeypatch.setattr(whole, "load_model", changed)
    with refused(ProofError, "the same model"):
        from_hf(theirs, tmp_path / "other")

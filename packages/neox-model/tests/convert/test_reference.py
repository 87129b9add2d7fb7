"""What transformers writes to the terminal is left out."""

import sys
from types import SimpleNamespace

import pytest
from torch import nn

from neox_model.convert.reference import load_model

pytest.importorskip("transformers")
tqdm = pytest.importorskip("tqdm").tqdm


class Model(nn.Module):
    @classmethod
    def from_pretrained(cls, folder, **_):
        """Load nothing, and show a bar, as compressed-tensors does."""
        for _ in tqdm(range(3), desc="decompressing", file=sys.stderr):
            pass
        return cls(), dict.fromkeys(("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))


def test_a_model_is_loaded_without_bars(tmp_path, monkeypatch, capfd):
    # By name: other tests import transformers anew.
    monkeypatch.setattr("transformers.ShownModel", Model, raising=False)
    assert isinstance(load_model(tmp_path, SimpleNamespace(class_name="ShownModel")), Model)
    assert capfd.readouterr().err == ""
    Model.from_pretrained(tmp_path)
    assert "decompressing" in capfd.readouterr().err

"""A long conversion shows what has been written and compared."""

import subprocess
import sys

import pytest

from neox_data import amount_progress
from neox_model.convert.from_hf import from_hf
from neox_model.convert.to_hf import to_hf
from neox_model.convert.verify import verify
from neox_model.inspection.finding import find_checkpoint
from support.hf_models import ENTRIES, write_model

pytestmark = pytest.mark.slow

SIZES = {"n_embd": 8, "n_head": 2, "n_layer": 3, "n_positions": 8, "vocab_size": ENTRIES}


def shown(capsys):
    """Return amount and whole amount by what was done, as they were shown last."""
    lines = [line.split(maxsplit=5) for line in capsys.readouterr().err.splitlines()]
    return {f"{subject} {done}": (int(count), int(total)) for count, _, total, subject, done, _ in lines}


def test_tensors_and_layers_are_counted_up_to_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(amount_progress, "_SECONDS_BETWEEN_LINES", 0.0)
    source = write_model(tmp_path / "source", "gpt2", SIZES)
    count = from_hf(source, tmp_path / "ours")["tensors"]
    every = (count, count)
    seen = shown(capsys)
    assert len(set(seen.pop("tensors written"))) == 1
    assert seen == {"tensors compared": every, "layers compared": (3, 3)}
    to_hf(find_checkpoint(tmp_path / "ours"), tmp_path / "theirs")
    assert shown(capsys)["tensors written"] == every
    verify(source, tmp_path / "theirs")
    assert shown(capsys) == {"tensors compared": every}


def stages(folder, *words):
    """Run neox-convert with its output in pipes, and return the lines of stderr."""
    command = [sys.executable, "-m", "neox_model.convert", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_every_stage_is_a_line_if_the_output_is_piped(tmp_path):
    write_model(tmp_path / "source", "gpt2", SIZES)
    proof = [
        "comparing architectures and tokenizers",
        "comparing 40 tensors",
        "comparing 3 layers",
        "comparing whole models",
    ]
    assert stages(tmp_path, "from-hf", "source", "--output", "ours") == [
        "importing torch",
        "reading source",
        "end-of-document is '<|endoftext|>' (0)",
        "writing 40 tensors",
        *proof,
        "ours/model.yml trains the model",
    ]
    assert stages(tmp_path, "to-hf", "--load", "ours", "--output", "theirs") == [
        "importing torch",
        "reading ours/global_step0",
        "writing 40 tensors",
        *proof,
    ]
    assert stages(tmp_path, "verify", "source", "theirs") == ["importing torch", "comparing 40 tensors"]

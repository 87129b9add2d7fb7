"""A long conversion shows what has been written and compared."""

from neox_data import amount_progress
from neox_model.convert.from_hf import from_hf
from neox_model.convert.to_hf import to_hf
from neox_model.convert.verify import verify
from neox_model.inspection.finding import find_checkpoint
from support.hf_models import ENTRIES, write_model

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

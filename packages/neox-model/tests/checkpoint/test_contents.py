"""The manifest: what is written is what is read, and what docs/formats.md says."""

from dataclasses import fields
from pathlib import Path

import pytest

from neox_config.facts.checkpoints import MANIFEST
from neox_model.checkpoint.contents import FORMAT, Layout, Manifest, Piece, TensorRecord

FORMATS = Path(__file__).parents[4] / "docs" / "formats.md"


def test_a_manifest_reads_back_equal(tmp_path):
    pieces = (
        Piece(block=((0, 3), (0, 4)), start=0, stop=12, file="a", key="w", crc32=1),
        Piece(block=((3, 6), (0, 4)), start=6, stop=12, file="b", key="w:6-12", crc32=2),
    )
    manifest = Manifest(
        iteration=7,
        layout=Layout(data=2, model=4, pipe=1),
        config={"lr": 0.1, "vocab_file": None, "text": "é"},
        tensors={"w": TensorRecord(shape=(6, 4), dtype="F32", pieces=pieces)},
        optimizer="AdamW",
        optimizer_scalars={"w": {"step": {"value": 3.0, "dtype": "F32"}}},
        schedule={"curve": {"peak": 1e-05}},
        files={"a": 100, "b": 80},
        packages={"python": "3.12.1", "torch": "2.11.0"},
    )
    (tmp_path / MANIFEST).write_text(manifest.to_json())
    assert Manifest.read(tmp_path) == manifest
    assert not manifest.tensors["w"].is_complete
    assert manifest.weight_names == {"w"}


@pytest.mark.parametrize("record", [Manifest, TensorRecord, Piece, Layout])
def test_the_documentation_names_every_field(record):
    text = FORMATS.read_text(encoding="utf-8").partition("## Checkpoint directory")[2]
    assert [field.name for field in fields(record) if f"`{field.name}`" not in text] == []
    assert FORMAT in text

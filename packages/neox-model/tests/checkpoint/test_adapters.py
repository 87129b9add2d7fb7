"""What a checkpoint of adapters records is checked before anything is computed with it."""

import hashlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from neox_config.facts.checkpoints import MANIFEST
from neox_model.checkpoint.adapters import Adapters, merge_adapters
from neox_model.checkpoint.base import load_base
from neox_model.checkpoint.contents import Layout, Manifest
from neox_model.checkpoint.errors import CheckpointError, DamagedCheckpointError
from neox_model.convert.errors import ConversionError
from neox_model.convert.lora.exported import Exported
from neox_model.inspection.cli import main
from neox_model.parallel.groups import SINGLE_PROCESS
from support.adapter_files import write_adapters
from support.checkpoint_edits import edit_manifest, edit_tensors, write_tensors
from support.refusals import refused, shows
from support.trainings import tensors_of

QKV, DENSE = "layers.0.attention.qkv", "layers.0.attention.dense"


@pytest.fixture
def adapters(tmp_path):
    """Return adapters of two matrices of a base without other layers."""
    base = tmp_path / "base" / "global_step0"
    base.mkdir(parents=True)
    weights = {f"{QKV}.weight": torch.ones(6, 4), f"{DENSE}.weight": torch.ones(4, 2)}
    records, size = write_tensors(base / "shard.safetensors", weights | {"norm.weight": torch.ones(4)})
    layout = Layout(data=1, model=1, pipe=1)
    manifest = Manifest(
        iteration=0, layout=layout, config={}, tensors=records, files={"shard.safetensors": size}
    )
    (base / MANIFEST).write_text(manifest.to_json())
    return write_adapters(base, tmp_path / "adapters", matrices=("qkv", "dense", "gate"))


def refusal(adapters, output):
    """Return the error of a merge."""
    with pytest.raises(CheckpointError) as caught:
        merge_adapters(adapters, output)
    assert not output.exists()
    done = CliRunner().invoke(main, ["merge", str(adapters), "--output", str(output)])
    assert done.exit_code == 1
    assert done.output.strip() == f"Error: {caught.value}"
    return str(caught.value)


def test_what_is_recorded_is_merged(adapters, tmp_path):
    merged = merge_adapters(adapters, tmp_path / "merged")
    assert Manifest.read(merged).weight_names == {f"{QKV}.weight", f"{DENSE}.weight", "norm.weight"}
    found = Adapters(adapters)
    assert (found.section.lora_rank, found.section.lora_alpha, found.scale) == (3, 7.0, 7 / 3)


UP = "layers.0.mlp.experts.up"


@pytest.mark.parametrize(("width", "names"), [(5, ["layers.0.mlp.experts.adapters.up.b"]), (4, [])])
def test_products_of_experts_are_added_to_their_matrices_and_not_exported(tmp_path, width, names):
    """The base's states of the model stay, and the averages of its weights do not."""
    weights = {"base": {UP: torch.ones(3, 2, 4)}, "adapters": {}}
    weights["base"] |= {
        f"model/{UP}/ema": torch.ones(3, 2, 4),
        "model/layers.0.mlp.router/bias": torch.ones(3),
    }
    a, b = torch.randn(3, 2, 1), torch.randn(3, 1, width)
    weights["adapters"] = {
        f"layers.0.mlp.experts.adapters.up.{name}": each for name, each in (("a", a), ("b", b))
    }
    layout, config = Layout(data=1, model=1, pipe=1), {}
    for name, tensors in weights.items():
        folder = tmp_path / name / "global_step0"
        folder.mkdir(parents=True)
        records, size = write_tensors(folder / "shard.safetensors", tensors)
        files = {"shard.safetensors": size}
        manifest = Manifest(iteration=0, layout=layout, config=config, tensors=records, files=files)
        (folder / MANIFEST).write_text(manifest.to_json())
        digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        base = {"folder": str(folder.parent), "iteration": 0, "manifest_sha256": digest}
        kinds = {"lora_rank": 1, "lora_alpha": 2.0, "lora_dropout": 0.0, "lora_target_modules": ["up", "qkv"]}
        config = kinds | {"base": base}
    if names:
        assert names[0] in refusal(folder, tmp_path / "merged")
        return
    merged = merge_adapters(folder, tmp_path / "merged")
    assert set(Manifest.read(merged).tensors) == {UP, "model/layers.0.mlp.router/bias"}
    found = tensors_of(tmp_path / "merged", 0)
    expected = 1 + 2 * torch.einsum("eir,ero->eio", a, b)
    torch.testing.assert_close(found[UP], expected.double(), rtol=1e-6, atol=1e-6)
    assert (found["model/layers.0.mlp.router/bias"] == 1).all()
    stored = SimpleNamespace(folder=tmp_path / "base", shapes={UP: (3, 2, 4)})
    with pytest.raises(ConversionError, match=UP):
        Exported(Adapters(folder), stored, None, [])


@pytest.mark.parametrize(
    ("has_vocab", "has_merges", "folder"),
    [(True, True, "new"), (True, False, "old"), (False, True, "old"), (False, False, "old")],
)
def test_a_merged_model_ends_texts_as_its_adapters_do(
    adapters, tmp_path, monkeypatch, has_vocab, has_merges, folder
):
    base = tmp_path / "base" / "global_step0"
    old = {"vocab_file": str(tmp_path / "old" / "v.json"), "merge_file": str(tmp_path / "old" / "m.txt")}
    edit_manifest(base, "config", {"stop_tokens": [], "seed": 3} | old)
    new = {"vocab_file": "new/v.json", "merge_file": "new/m.txt"}
    edit_manifest(adapters, "config", {"stop_tokens": [7], "seed": 4} | new)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    for name, exists in (("v.json", has_vocab), ("m.txt", has_merges)):
        if exists:
            (tmp_path / "new" / name).touch()
    digest = hashlib.sha256((base / MANIFEST).read_bytes()).hexdigest()
    record = {"folder": str(base.parent), "iteration": 0, "manifest_sha256": digest}
    edit_manifest(adapters, "config", {"base": record})
    merged = Manifest.read(merge_adapters(adapters, tmp_path / "merged"))
    files = {name: str(tmp_path / folder / Path(path).name) for name, path in new.items()}
    assert merged.config == {"stop_tokens": [7], "seed": 3} | files


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lora_rank", 0, "lora_rank is 0"),
        ("lora_rank", -1, "greater than or equal to 0"),
        ("lora_rank", 65_537, "less than or equal to 65536"),
        ("lora_rank", 10**400, "a number between"),
        ("lora_rank", True, "must be a whole number"),
        ("lora_rank", 2.5, "must be a whole number"),
        *(("lora_rank", value, "lora_rank: ") for value in (None, [3], {"3": 3}, "three", "../3")),
        *(("lora_alpha", value, "lora_alpha: ") for value in (None, 0, -1, 1e400, "NaN", 10**400, [])),
        *(("lora_dropout", value, "lora_dropout: ") for value in (None, 1, -0.1, "x", {})),
        *(("lora_target_modules", value, "lora_target_modules: ") for value in (None, 3, "qkv", {})),
        ("lora_target_modules", ["qkv", "../../etc"], "lora_target_modules / 1: "),
        ("lora_target_modules", ["x" * 100_000], "lora_target_modules / 0: "),
    ],
)
def test_values_that_no_adapters_have_are_named(adapters, tmp_path, name, value, message):
    edit_manifest(adapters, "config", {name: value})
    found = refusal(adapters, tmp_path / "merged")
    assert found.startswith(f"{adapters}: the manifest is damaged: config / {name}")
    assert message in found
    assert found.endswith("; restore it from a copy")
    assert len(found) < 400 + len(str(adapters))


@pytest.mark.parametrize("name", ["lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules"])
def test_missing_values_are_named(adapters, name):
    edit_manifest(adapters, "config", {}, without=[name])
    with refused(DamagedCheckpointError, name, code="damaged-manifest"):
        Adapters(adapters)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "lora_rank",
            65_536,
            "lora_rank 65536 and",
        ),
        ("lora_rank", 2, "but lora_rank 2"),
        ("lora_target_modules", ["qkv"], DENSE),
        ("lora_target_modules", [], f"{DENSE}, {QKV}"),
    ],
)
def test_values_that_do_not_fit_the_tensors_are_refused(adapters, tmp_path, name, value, message):
    edit_manifest(adapters, "config", {name: value})
    with refused(CheckpointError, message):
        merge_adapters(adapters, tmp_path / "merged")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{QKV}.adapter.b": torch.ones(7, 3)}, "qkv.adapter.b has the"),
        ({f"{QKV}.adapter.a": torch.ones(3)}, "qkv.adapter.a has the"),
        ({f"{QKV}.adapter.a": None}, "contain whole adapters"),
        ({f"{QKV}.adapter.a": None, f"{QKV}.adapter.b": None}, QKV),
        ({f"layers.9.{QKV[9:]}.adapter.{side}": torch.ones(3, 3) for side in "ab"}, "layers.9"),
    ],
)  # fmt: skip
def test_adapters_that_do_not_fit_the_base_are_refused(adapters, tmp_path, change, message):
    def edit(tensors):
        for name, values in change.items():
            if values is None:
                del tensors[name]
            else:
                tensors[name] = values

    edit_tensors(adapters, edit)
    with refused(CheckpointError, message):
        merge_adapters(adapters, tmp_path / "merged")
    assert not list(tmp_path.glob("merged/*"))


@pytest.mark.parametrize(
    "record",
    [
        *(3, "base", [], {}, {"folder": 3, "iteration": 0, "manifest_sha256": "x"}),
        {"folder": "base", "iteration": -1, "manifest_sha256": "x"},
        *({"folder": folder, "iteration": 0, "manifest_sha256": "x"} for folder in ("", "a\0b", "x" * 5000)),
        {"folder": "base", "iteration": 0, "manifest_sha256": None},
    ],
)
def test_a_record_of_the_base_of_another_form_is_refused(adapters, tmp_path, record):
    edit_manifest(adapters, "config", {"base": record})
    message = (
        f"{adapters}: the manifest is damaged: config / base does not contain a folder, an iteration and a "
        "SHA-256; restore it from a copy"
    )
    assert refusal(adapters, tmp_path / "merged") == message
    # A run that resumes the adapters finds their base with it.
    base = str(tmp_path / "base")
    with pytest.raises(CheckpointError) as caught:
        load_base(
            base,
            torch.nn.Module(),
            adapters=adapters.parent,
            groups=SINGLE_PROCESS,
            config={},
            writable=nullcontext,
        )
    assert shows(caught.value, f"{base} failed", message)


@pytest.mark.parametrize("folder", ["../../elsewhere", "x" * 300, "/proc/self/mem"])
def test_a_base_that_is_not_there_is_refused(adapters, tmp_path, folder):
    record = Manifest.read(adapters).config["base"] | {"folder": folder}
    edit_manifest(adapters, "config", {"base": record})
    assert "folder with --base" in refusal(adapters, tmp_path / "merged")

"""A dense checkpoint becomes one with experts that computes the same."""

import pytest
import torch
import yaml
from click.testing import CliRunner

from neox_config import load_config
from neox_model.api.model import load_model
from neox_model.convert import from_hf as importing
from neox_model.convert import upcycle as upcycling
from neox_model.convert.checkpoints import Checkpoint
from neox_model.convert.cli import main
from neox_model.convert.errors import ConversionError, ProofError
from neox_model.convert.upcycle import upcycle
from support.hf_models import ENTRIES, SMALL, write_model
from support.refusals import refused

SIZES = {**SMALL, "num_hidden_layers": 3, "intermediate_size": 24}
SPLITS = {
    "copies": {"experts": 5, "top_k": 3},
    "halves": {"experts": 6, "top_k": 4, "granularity": 2},
    "quarters in some layers": {"experts": 16, "top_k": 4, "granularity": 4, "layers": (0, 2)},
}


@pytest.fixture
def dense(tmp_path, monkeypatch):
    """Return a function that writes a dense checkpoint of ours."""
    monkeypatch.setattr(importing, "prove", lambda *arguments, **options: {})

    def write(family="llama", **changes):
        dtype = changes.pop("dtype", torch.float32)
        write_model(tmp_path / "theirs", family, {**SIZES, **changes}, dtype=dtype)
        importing.from_hf(tmp_path / "theirs", tmp_path / "dense")
        return tmp_path / "dense" / "global_step0"

    return write


def logits(folder, precision="fp32"):
    model = load_model(folder, precision=precision).module
    tokens = torch.randint(0, ENTRIES, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens).double()


@pytest.mark.parametrize("name", SPLITS)
def test_logits_are_those_of_the_dense_model(tmp_path, dense, name):
    source = dense(dtype=torch.bfloat16)
    result = upcycle(source, tmp_path / "mixed", **SPLITS[name])
    one, other = logits(source), logits(tmp_path / "mixed")
    assert float((one - other).abs().max() / one.abs().max()) < 1e-6
    assert max(result["largest_differences"].values()) < 1e-6
    # In bfloat16, where both round: the experts are at most twice as far from the exact results.
    errors = [float((logits(each, "bf16") - one).pow(2).mean()) for each in (source, tmp_path / "mixed")]
    assert 0 < errors[1] < 4 * errors[0]


def test_experts_are_slices_and_their_router_rows_are_those_of_copies(tmp_path, dense):
    source = dense()
    upcycle(source, tmp_path / "one", **SPLITS["halves"])
    upcycle(source, tmp_path / "other", **SPLITS["halves"], seed=5)
    before = Checkpoint(source)
    found, other = (Checkpoint(tmp_path / name / "global_step0") for name in ("one", "other"))
    up, down = (before.whole(f"layers.1.mlp.{each}.weight") for each in ("up", "down"))
    for expert in range(6):
        part = slice(12, None) if expert % 2 else slice(12)
        assert torch.equal(found.whole("layers.1.mlp.experts.up")[expert], up[part].t())
        assert torch.equal(found.whole("layers.1.mlp.experts.down")[expert], 2 * down[:, part].t())
    rows = found.whole("layers.1.mlp.router.weight")
    assert torch.equal(rows[0::2], rows[1::2])
    assert len({tuple(row.tolist()) for row in rows}) == 3
    assert not torch.equal(rows, other.whole("layers.1.mlp.router.weight"))
    assert not torch.equal(rows, found.whole("layers.0.mlp.router.weight"))


def test_a_wrong_factor_is_found(tmp_path, dense, monkeypatch):
    monkeypatch.setattr(upcycling, "_factor", lambda split: 1)
    with refused(ProofError):
        upcycle(dense(), tmp_path / "mixed", **SPLITS["halves"])
    assert not (tmp_path / "mixed").exists()


@pytest.mark.parametrize(
    "split",
    [
        {"experts": 6, "top_k": 3, "granularity": 3},
        {"experts": 6, "top_k": 3, "granularity": 2},
        {"experts": 7, "top_k": 4, "granularity": 2},
        {"experts": 32, "top_k": 16, "granularity": 16},
        {"experts": 4, "top_k": 1},
        {"experts": 2, "top_k": 3},
        {"experts": 4, "top_k": 2, "layers": (3,)},
    ],
)
def test_what_would_not_compute_the_same_is_refused(tmp_path, dense, split):
    with refused(ConversionError):
        upcycle(dense(), tmp_path / "mixed", **split)


def test_blocks_with_biases_or_experts_are_refused(tmp_path, dense):
    source = dense()
    upcycle(source, tmp_path / "mixed", experts=4, top_k=2)
    with refused(ConversionError, "0", "experts already"):
        upcycle(tmp_path / "mixed" / "global_step0", tmp_path / "again", experts=4, top_k=2)


def test_blocks_with_biases_are_refused(tmp_path, dense):
    with refused(ConversionError, "0", "biases"):
        upcycle(dense(mlp_bias=True), tmp_path / "mixed", experts=4, top_k=2)


def test_the_command_writes_a_configuration_that_trains_the_model(tmp_path, dense):
    source = dense(dtype=torch.bfloat16)
    output = tmp_path / "mixed"
    options = ["--experts", "8", "--top-k", "4", "--granularity", "2", "--layer", "1"]
    done = CliRunner().invoke(main, ["upcycle", str(source.parent), "--output", str(output), *options])
    assert done.exit_code == 0, done.output
    settings = yaml.safe_load((output / "model.yml").read_text())
    expected = {"moe-layers": [1], "moe-expert-width": 12, "moe-router-type": "topk", "finetune": True}
    assert {name: settings[name] for name in expected} == expected
    config = load_config([output / "model.yml"], overrides=["data-path=x", "save=y"])
    assert (config.checkpoint.load, settings["precision"]) == (str(output), "bf16")

"""Folders of one kind are compared by their values, and rounding is reported as what it is."""

import json
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from neox_model.convert.cli import main
from neox_model.convert.errors import ProofError
from neox_model.convert.families.family import Tensors
from neox_model.convert.forms import FUSED_QKV, SAME, SEPARATE_QKV
from neox_model.convert.lora import proof
from neox_model.convert.lora.exported import PREFIX, A, B
from neox_model.convert.proof import rounding
from neox_model.convert.proof.rounding import compare_values
from neox_model.convert.verify import verify
from support.hf_models import ENTRIES, write_model
from support.refusals import refused, shows

SIZES = {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 8, "vocab_size": ENTRIES}
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


def written(folder, dtype, change=None):
    """Write the same model in a dtype."""
    path = write_model(folder, "gpt2", SIZES, dtype=FLOAT32) / "model.safetensors"
    tensors = {name: values.to(dtype) for name, values in load_file(path).items()}
    if change is not None:
        change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("rounded", ["A", "B"])
def test_a_loss_of_precision_is_reported(tmp_path, dtype, rounded):
    whole, half = written(tmp_path / "whole", FLOAT32), written(tmp_path / "half", dtype)
    folders = (half, whole) if rounded == "A" else (whole, half)
    result = verify(*folders)
    assert (result["verdict"], result["differences"]) == ("equal after rounding", [])
    (what,) = result["rounded"]
    other = "B" if rounded == "A" else "A"
    name = str(dtype).removeprefix("torch.")
    assert shows(what, rounded, name, other, "float32")
    done = CliRunner().invoke(main, ["verify", *map(str, folders)])
    assert done.exit_code == 0
    assert done.output.startswith("equal after rounding: ")
    assert what in done.output
    assert json.loads(CliRunner().invoke(main, ["verify", *map(str, folders), "--json"]).output) == result


def test_two_types_with_the_same_values_are_equal(tmp_path):
    def simple(tensors):
        for name in tensors:
            tensors[name] = tensors[name].sign() * 0.75

    one, other = written(tmp_path / "one", BFLOAT16, simple), written(tmp_path / "other", FLOAT16, simple)
    result = verify(one, other)
    assert (result["verdict"], result["rounded"]) == ("equal", [])


@pytest.mark.parametrize("is_reversed", [True, False])
def test_neither_of_two_16_bit_types_is_rounded_silently(tmp_path, is_reversed):
    """The result does not depend on the order, and says why values differ."""

    def add(tensors):
        tensors["transformer.wte.weight"][0, 0] = 1.0 + 2**-9  # Between two values of bfloat16.

    half, brain = written(tmp_path / "half", FLOAT16, add), written(tmp_path / "brain", BFLOAT16)
    folders = (brain, half) if is_reversed else (half, brain)
    result = verify(*folders)
    assert result["verdict"] == "different"
    (line,) = (line for line in result["differences"] if line.startswith("transformer.wte.weight"))
    assert shows(line, "the other rounded")
    names = ("A is bfloat16", "B float16") if is_reversed else ("A is float16", "B bfloat16")
    assert all(name in line for name in names)
    assert CliRunner().invoke(main, ["verify", *map(str, folders)]).exit_code == 1


def test_bfloat16_of_a_float16_model_is_rounded(tmp_path):
    half = written(tmp_path / "half", FLOAT16)
    path = written(tmp_path / "brain", FLOAT16) / "model.safetensors"
    save_file({name: each.bfloat16() for name, each in load_file(path).items()}, path)
    for folders, side in (((half, path.parent), "B"), ((path.parent, half), "A")):
        (what,) = verify(*folders)["rounded"]
        assert shows(what, side, "bfloat16", "A" if side == "B" else "B", "float16")


@pytest.mark.parametrize("place", [0, 7])
def test_one_value_that_rounding_does_not_give_is_a_difference(place):
    one = torch.randn(8, generator=torch.Generator().manual_seed(0))
    other = one.bfloat16()
    assert compare_values([(one, other)], (FLOAT32, BFLOAT16)).rounded == 1
    other[place] *= 1 + 2**-7
    found = compare_values([(one[:4], other[:4]), (one[4:], other[4:])], (FLOAT32, BFLOAT16))
    assert (found.rounded, found.is_same, found.values) == (None, False, 8)


def test_a_value_that_the_type_cannot_hold_is_a_difference():
    one = torch.tensor([1e6])
    assert not compare_values([(one, one.half())], (FLOAT32, FLOAT16)).is_same


def test_a_matrix_is_compared_in_pieces(monkeypatch):
    """The result is that of the whole, and no tensor on the way has more elements than a piece."""
    one = torch.randn(30, 70, generator=torch.Generator().manual_seed(0))
    one[0, 0] = float("inf")  # In both, and therefore no difference.
    other = one.bfloat16()
    damaged = other.clone()
    damaged[29, 69] *= 2
    missing = other.clone()
    missing[12, 3] = float("nan")
    for there in (other, damaged, missing, one + 0.5):
        pair, dtypes = (one, there), (FLOAT32, there.dtype)
        whole = compare_values([pair], dtypes)
        with monkeypatch.context() as patch, _Sizes() as made:
            patch.setattr(rounding, "PIECE", 350)
            assert compare_values([pair], dtypes) == whole
            # What is a view of a tensor that existed before is not made.
            assert 350 >= max(made.sizes) > 0
    assert compare_values([(one, other)], (FLOAT32, BFLOAT16)).rounded == 1
    assert compare_values([(one[0, 1], other[0, 1])], (FLOAT32, BFLOAT16)).values == 1


@pytest.mark.parametrize("form", [SAME, SEPARATE_QKV, FUSED_QKV], ids=["same", "separate", "fused"])
def test_products_of_adapters_are_compared_in_pieces(monkeypatch, form):
    """Each element is, and no tensor on the way has more elements than a piece."""
    random = torch.Generator().manual_seed(0)
    attention = SimpleNamespace(heads=4, kv_heads=4, head_width=2)
    a, b = torch.randn(3, 70, generator=random), torch.randn(24, 3, generator=random)
    parts = form.rows_to_theirs(b, attention)
    names = [f"part{number}" for number in range(len(parts))]
    weight = Tensors("qkv", (24, 70), dict.fromkeys(names, ()), form, attention)
    matrix = SimpleNamespace(ours="qkv", theirs=names, weight=weight)
    exported = SimpleNamespace(
        matrices=[matrix], is_transposed=form.is_transposed, packing=SimpleNamespace(rank=3, alpha=6.0),
        adapters=SimpleNamespace(pair=lambda name: (a, b), scale=2.0),
    )  # fmt: skip
    tensors = {f"{PREFIX}{name}{A}": a for name in names} | {
        f"{PREFIX}{name}{B}": part for name, part in zip(names, parts, strict=True)
    }
    stored = SimpleNamespace(folder="theirs", tensors=tensors, whole=lambda name: tensors[name].clone())
    monkeypatch.setattr(proof, "PIECE", 350)
    with _Sizes() as made:
        proof._compare_products(exported, stored)
    assert 350 >= max(made.sizes) > 0
    last = f"{PREFIX}{names[-1]}"
    for name, row, column in ((last + A, 2, 69), (last + A, 0, 0), (last + B, -1, 2)):
        changed = tensors[name].clone()
        changed[row, column] += 1e-6
        with monkeypatch.context() as patch:
            patch.setitem(tensors, name, changed)
            with refused(ProofError, names[-1]):
                proof._compare_products(exported, stored)
    del tensors[last + A]
    with refused(ProofError, "the same model"):
        proof._compare_products(exported, stored)


class _Sizes(TorchDispatchMode):
    """Records the elements of new tensors."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not found._is_view():
            self.sizes.append(found.numel())
        return found


def test_values_of_one_type_are_never_rounded():
    one = torch.tensor([1.0, 2.0])
    found = compare_values([(one, one + 1e-3)], (FLOAT32, FLOAT32))
    assert (found.apart, found.rounded, found.why(("A", "B"))) == (2, None, "")
    assert found.largest == pytest.approx(1e-3, rel=1e-3)

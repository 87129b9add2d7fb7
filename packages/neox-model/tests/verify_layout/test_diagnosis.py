"""What differences mean: each kind of fault, in values that have it."""

import pytest
import torch

from neox_model.verify_layout.diagnosis import Sizes, answer_of
from neox_model.verify_layout.observer import Values
from neox_model.verify_layout.rows import LIMITS, Piece, Place, compare_values
from support.refusals import shows

SIZES = Sizes(data=2, tensor=2, stages=1, accumulation=3)
PLACES = [
    Place(rank=data * 2 + tensor, data=data, tensor=tensor, stage=0) for data in (0, 1) for tensor in (0, 1)
]
ROWS, WIDTH = 8, 6


def reference():
    """A split and a copied weight, each the sum of what six micro-batches add."""
    generator, values = torch.Generator().manual_seed(0), Values()
    for name in ("split.weight", "copied.weight"):
        parts = torch.randn(6, ROWS, WIDTH, generator=generator, dtype=torch.float64)
        for number, part in enumerate(parts):
            values.put(f"micro-batch {number}", 1, name, part)
        values.put("gradients", 1, name, parts.sum(dim=0))
    return values


def block_of(name, place):
    half = ROWS // 2
    rows = (place.tensor * half, (place.tensor + 1) * half) if name.startswith("split") else (0, ROWS)
    return (rows, (0, WIDTH))


def explained(change, values=None):
    """The first finding if `change` maps (name, place, expected, values) to what a rank has."""
    values = values or reference()
    rows, pieces = [], []
    for name in ("split.weight", "copied.weight"):
        whole = values.get("gradients", 1, name)
        for place in PLACES:
            block = block_of(name, place)
            expected = whole[tuple(slice(*bounds) for bounds in block)].reshape(-1)
            found = change(name, place, expected.clone(), values)
            about = {"step": 1, "kind": "gradients", "name": name, "place": place}
            row = compare_values(
                found, expected, scale=float(expected.norm()), is_split=name.startswith("split"), **about
            )
            rows.append(row)
            if row.error > 1e-10:
                pieces.append(Piece(row=row, block=block, start=0, values=found))
    return answer_of(rows, pieces, [], values, SIZES, limit=LIMITS["fp64"])


def first(change):
    (finding, *_) = explained(change).findings
    return f"{finding.what}: {finding.meaning}"


def test_equal_values_have_no_finding():
    answer = explained(lambda name, place, expected, values: expected)
    assert answer.findings == ()
    (part,) = answer.parts
    assert (part.compared, part.differing) == (8, 0)


def test_a_factor_of_all_tensors_is_that_of_the_replicas_or_the_micro_batches():
    text = first(lambda name, place, expected, values: 2 * expected)
    assert "all 2 tensors" in text
    assert "2 times" in text
    assert "data-parallel" in text
    text = first(lambda name, place, expected, values: expected / 3)
    assert "1/3 times" in text
    assert "micro-batches of an" in text


def test_a_factor_of_copied_tensors_alone_is_that_of_the_tensor_parallel_group():
    text = first(lambda name, place, expected, values: expected * (2 if name.startswith("copied") else 1))
    assert "copied.weight" in text
    assert "tensor-parallel group once" in text


def test_a_missing_sum_over_the_tensor_parallel_group():
    def change(name, place, expected, values):
        if name.startswith("split"):
            return expected
        noise = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).sin()
        return expected / 2 + (noise if place.tensor else -noise)

    assert "tensor-parallel group is" in first(change)


def test_replicas_that_are_not_averaged():
    def change(name, place, expected, values):
        block = tuple(slice(*bounds) for bounds in block_of(name, place))
        own = [values.get(f"micro-batch {number}", 1, name)[block] for number in range(place.data, 6, 2)]
        return 2 * sum(own).reshape(-1)

    text = first(change)
    assert shows(text, "micro-batches", "2 times")
    assert "data-parallel group" in text


def test_accumulation_that_is_lost():
    def change(name, place, expected, values):
        block = tuple(slice(*bounds) for bounds in block_of(name, place))
        return sum(values.get(f"micro-batch {number}", 1, name)[block] for number in (4, 5)).reshape(-1)

    assert shows(first(change), "micro-batch 3", "3")


def test_a_swapped_shard():
    def change(name, place, expected, values):
        if name.startswith("copied"):
            return expected
        other = Place(rank=0, data=place.data, tensor=1 - place.tensor, stage=0)
        return values.get("gradients", 1, name)[tuple(slice(*b) for b in block_of(name, other))].reshape(-1)

    assert "shard is swapped" in first(change)


def test_permuted_rows():
    assert "permuted" in first(lambda name, place, expected, values: expected.flip(0))


def test_one_rank_is_named():
    text = first(lambda name, place, expected, values: expected * (1 if place.rank != 3 else 0))
    assert "on rank 3" in text
    assert "values are 0" in text


def test_ranks_along_an_axis_are_named():
    assert shows(
        first(lambda name, place, expected, values: expected * (0 if place.data else 1)), "data 1", "2, 3"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(value):
    assert "not finite" in first(lambda name, place, expected, values: expected + value)

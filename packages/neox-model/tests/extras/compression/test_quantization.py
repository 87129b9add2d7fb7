"""Quantized weights and inputs against plain float64 readings of the formulas, whole and split over ranks."""

import math

import pytest
import torch
from torch import Tensor

from neox_model.extras.compression.quantization import (
    InputQuantizer,
    Rounding,
    WeightQuantizer,
    quantize_inputs,
    uniform_noise,
)
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.topology import create_groups
from support.distributed import run_ranks

ROWS, COLUMNS = 6, 8


def weights(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, COLUMNS, generator=generator) * torch.linspace(0.1, 2, ROWS)[:, None]


def quantizer(
    bits: int | None,
    *,
    kind="symmetric",
    groups: int = 1,
    is_stochastic: bool = False,
    group=SINGLE_RANK,
    dim=0,
) -> WeightQuantizer:
    sizes = [ROWS, COLUMNS]
    part = sizes[dim] // group.size
    slices = [(0, ROWS), (0, COLUMNS)]
    slices[dim] = (group.rank * part, (group.rank + 1) * part)
    made = WeightQuantizer(
        "layers.0.mlp.up",
        shape=(ROWS, COLUMNS),
        slices=(slices[0], slices[1]),
        group=group,
        groups=groups,
        rounding=Rounding(kind=kind, is_stochastic=is_stochastic),
        in_forward=True,
        seed=3,
    )
    made.bits = bits
    return made


def plain(weight: Tensor, bits: int, *, kind: str, groups: int) -> Tensor:
    """One number after the other, in float64, as the formulas are written."""
    result = []
    flat = weight.double().flatten().tolist()
    size = len(flat) // groups
    for start in range(0, len(flat), size):
        group = flat[start : start + size]
        if kind == "symmetric" and bits == 1:
            mean = sum(map(abs, group)) / size
            result += [math.copysign(mean, value) for value in group]
        elif kind == "symmetric" and bits == 2:
            bound = 0.7 * sum(map(abs, group)) / size
            above = [abs(value) for value in group if abs(value) > bound]
            level = sum(above) / len(above)
            result += [math.copysign(level, value) if abs(value) > bound else 0.0 for value in group]
        elif kind == "symmetric":
            step = 2 * max(map(abs, group)) / 2**bits
            half = 2 ** (bits - 1)
            result += [step * min(max(round(value / step), -half), half - 1) for value in group]
        else:
            step = (max(group) - min(group)) / 2**bits
            zero = step * round(min(group) / step)
            result += [
                step * min(max(round((value - zero) / step), 0), 2**bits - 1) + zero for value in group
            ]
    return torch.tensor(result, dtype=torch.float64).view(weight.shape)


CASES = [
    *((bits, "symmetric", groups) for bits in (1, 2, 3, 4, 8) for groups in (1, 3, 6, 12)),
    *((bits, "asymmetric", groups) for bits in (1, 2, 4, 8) for groups in (1, 6)),
]


@pytest.mark.parametrize(("bits", "kind", "groups"), CASES)
def test_weights_are_those_of_the_formula(bits, kind, groups):
    found = quantizer(bits, kind=kind, groups=groups)(weights())
    expected = plain(weights(), bits, kind=kind, groups=groups)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)
    levels = {round(value, 5) for value in expected.view(groups, -1)[0].tolist()}
    assert len(levels) <= (3 if (bits, kind) == (2, "symmetric") else 2**bits)


def test_gradients_pass_as_if_nothing_was_rounded():
    weight = weights().requires_grad_()
    factor = weights(1)
    (quantizer(3)(weight) * factor).sum().backward()
    assert torch.equal(weight.grad, factor)


def test_weights_before_the_offset_are_unchanged():
    weight = weights()
    assert quantizer(None)(weight) is weight


def test_a_share_of_quantized_values_is_mixed_with_exact_ones():
    made = quantizer(2)
    made.share = 0.25
    expected = 0.25 * plain(weights(), 2, kind="symmetric", groups=1) + 0.75 * weights().double()
    torch.testing.assert_close(made(weights()).double(), expected, atol=1e-6, rtol=1e-6)


def test_equal_weights_of_a_group_are_kept_and_zeros_stay_zeros():
    assert torch.equal(quantizer(4)(torch.zeros(ROWS, COLUMNS)), torch.zeros(ROWS, COLUMNS))
    same = torch.full((ROWS, COLUMNS), 0.3)
    assert torch.equal(quantizer(4, kind="asymmetric")(same), same)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_rounded_like_those_of_32(dtype):
    weight = weights().to(dtype)
    found = quantizer(4, groups=ROWS)(weight)
    assert found.dtype == dtype
    expected = quantizer(4, groups=ROWS)(weight.float())
    torch.testing.assert_close(found.float(), expected.to(dtype).float(), atol=0, rtol=0)


def test_stochastic_rounding_chooses_a_neighbour_and_is_right_on_average():
    made, total = quantizer(4, is_stochastic=True), torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    exact = weights().double()
    step = 2 * float(exact.abs().max()) / 16
    for made.iteration in range(400):
        found = made(weights()).double()
        inner = exact.abs() < 7 * step
        assert ((found - exact).abs()[inner] < step).all()
        total += found
    assert float(((total / 400 - exact).abs()[inner]).max()) < 0.12 * step
    assert not torch.equal(found, quantizer(4)(weights()).double())


def test_noise_depends_on_the_place_and_on_the_key_and_is_uniform():
    places = torch.arange(100_000)
    noise = uniform_noise(places, "key")
    assert torch.equal(noise[500:600], uniform_noise(places[500:600], "key"))
    assert not torch.equal(noise, uniform_noise(places, "other"))
    assert float(noise.min()) >= 0
    assert float(noise.max()) < 1
    counts = torch.histc(noise, bins=10, min=0, max=1)
    assert counts.tolist() == pytest.approx([10_000] * 10, abs=400)


def blocks_of_ranks(
    dim: int, bits: int, kind: str, groups: int, is_stochastic: bool, is_local: bool
) -> list[list[float]]:
    group = create_groups(2, 0).model
    made = quantizer(bits, kind=kind, groups=groups, is_stochastic=is_stochastic, group=group, dim=dim)
    if is_local:
        # The fault: scales of a rank's own block.
        made._group = SINGLE_RANK
    return made(weights().chunk(2, dim=dim)[group.rank]).tolist()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("bits", "kind", "groups", "is_stochastic"),
    [
        (4, "symmetric", 1, False),
        (4, "asymmetric", 2, False),
        (4, "symmetric", 12, True),
        (2, "symmetric", 3, False),
    ],
)
def test_ranks_round_their_blocks_like_the_whole_matrix(dim, bits, kind, groups, is_stochastic):
    case = {"bits": bits, "kind": kind, "groups": groups, "is_stochastic": is_stochastic}
    found = torch.cat(
        [torch.tensor(part) for part in run_ranks(blocks_of_ranks, size=2, dim=dim, **case, is_local=False)],
        dim=dim,
    )
    expected = quantizer(bits, kind=kind, groups=groups, is_stochastic=is_stochastic)(weights())
    assert torch.equal(found, expected)


def test_scales_of_blocks_are_found():
    case = {"bits": 4, "kind": "symmetric", "groups": 1, "is_stochastic": False}
    found = run_ranks(blocks_of_ranks, size=2, dim=0, **case, is_local=True)
    expected = quantizer(4)(weights())
    assert not torch.equal(torch.cat([torch.tensor(part) for part in found]), expected)


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_each_token_has_its_own_range_if_it_is_dynamic(kind):
    inputs = weights().view(2, 3, COLUMNS)
    made = InputQuantizer(4, Rounding(kind=kind), is_dynamic=True, group=SINGLE_RANK)
    assert made(inputs) is inputs
    made.is_on = True
    expected = plain(weights(), 4, kind=kind, groups=ROWS).view_as(inputs)
    torch.testing.assert_close(made(inputs).double(), expected, atol=1e-6, rtol=1e-6)


def tokens_of_ranks() -> list[list[float]]:
    group: Group = create_groups(2, 0).model
    made = InputQuantizer(4, Rounding(kind="asymmetric"), is_dynamic=True, group=group)
    made.is_on = True
    return made(weights().chunk(2, dim=1)[group.rank]).tolist()


def test_ranks_with_parts_of_a_token_use_the_range_of_the_whole():
    found = torch.cat([torch.tensor(part) for part in run_ranks(tokens_of_ranks, size=2)], dim=1)
    made = InputQuantizer(4, Rounding(kind="asymmetric"), is_dynamic=True, group=SINGLE_RANK)
    made.is_on = True
    assert torch.equal(found, made(weights()))


def test_a_static_range_is_a_running_average_that_starts_with_the_first_batch():
    made = InputQuantizer(8, Rounding(kind="symmetric"), is_dynamic=False, group=SINGLE_RANK)
    made.is_on = True
    batches = [weights(seed) * (1 + seed) for seed in range(3)]
    assert torch.equal(made(batches[0]), batches[0])
    low, high = float(batches[0].min()), float(batches[0].max())
    made.update_range(made.seen)
    for batch in batches[1:]:
        found = made(batch)
        low_now, high_now = made.range
        assert (float(low_now), float(high_now)) == pytest.approx((low, high), rel=1e-6)
        expected = quantize_inputs(
            batch.double(), torch.tensor(low).double(), torch.tensor(high).double(), 8, "symmetric"
        )
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
        low, high = 0.95 * low + 0.05 * float(batch.min()), 0.95 * high + 0.05 * float(batch.max())
        made.update_range(made.seen)


def test_evaluations_do_not_change_the_range_and_values_that_are_not_finite_are_left_out():
    made = InputQuantizer(8, Rounding(kind="symmetric"), is_dynamic=False, group=SINGLE_RANK)
    made.eval()
    made(weights())
    assert made.seen.tolist() == [-math.inf, -math.inf]
    made.train()
    made(torch.tensor([[1.0, math.inf]]))
    made.update_range(made.seen)
    assert made.range.tolist() == [0.0, 0.0]
    assert made.to(torch.bfloat16).range.dtype == torch.float32

"""1-bit LAMB against LAMB before its freeze, and against a plain float64 reading of its paper after it."""

import pytest
import torch
from torch import Tensor

from neox_model.extras.one_bit.lamb import OneBitLamb
from neox_model.optim.lamb import Lamb
from neox_model.parallel.groups import SINGLE_RANK, Group, part_length
from support.distributed import run_ranks
from support.one_bit import PlainAverage

LAMB = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "max_coeff": 8.0, "min_coeff": 0.1}
SETTINGS = LAMB | {"coeff_beta": 0.7, "factor_max": 1.2, "factor_min": 0.6, "factor_threshold": 0.05}
FREEZE, UPDATES, DECAY = 3, 9, 0.2
LENGTHS = (37, 20)
NO_GRADIENT, TINY_GRADIENT = slice(5, 9), slice(12, 15)


def gradients_of(rank: int, update: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + update)
    # Gradients that shrink: the factors grow, until they are limited.
    gradients = [torch.randn(length, generator=generator) * 0.8**update for length in LENGTHS]
    gradients[0][NO_GRADIENT] = 0
    gradients[0][TINY_GRADIENT] *= 1e-5 if update <= FREEZE else 1
    return gradients


def start() -> list[dict]:
    generator = torch.Generator().manual_seed(7)
    first, second = (torch.nn.Parameter(torch.randn(length, generator=generator)) for length in LENGTHS)
    return [{"params": [first], "weight_decay": DECAY}, {"params": [second], "weight_decay": 0.0}]


def by_paper(ranks: int, index: int, *, bias_correction: bool) -> tuple[list[Tensor], list[float]]:
    """The paper's algorithm for one weight on all ranks in float64: weights and factors of every update."""
    group = start()[index]
    weight, decay = group["params"][0].detach().double(), group["weight_decay"]
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    length, (beta1, beta2) = LENGTHS[index], SETTINGS["betas"]
    average = PlainAverage(length, replicas=ranks, part=part_length(length, ranks))
    trust, factor, weights, factors = None, 1.0, [], []
    for update in range(1, UPDATES + 1):
        gradients = [gradients_of(rank, update)[index].double() for rank in range(ranks)]
        of_mean = 1 - beta1**update if bias_correction else 1.0
        of_square = 1 - beta2 ** min(update, FREEZE) if bias_correction else 1.0
        of_fresh = 1 - beta2**update if bias_correction else 1.0
        if update <= FREEZE:
            gradient = torch.stack(gradients).mean(dim=0)
            mean = beta1 * mean + (1 - beta1) * gradient
            square = beta2 * square + (1 - beta2) * gradient**2
            fresh = square
        else:
            local = [(beta1 * mean + (1 - beta1) * each) * (square > 0) for each in gradients]
            last, mean = mean, average(local, square > 0) if ranks > 1 else local[0]
            implied = (mean - beta1 * last) / (1 - beta1)
            fresh = beta2 * fresh + (1 - beta2) * implied**2
        root, fresh_root = (square / of_square).sqrt(), (fresh / of_fresh).sqrt()
        if update > FREEZE:
            # Beyond the paper: no root is less than a tenth of the root of the mean.
            root, fresh_root = (
                each.maximum(0.1 * each.square().mean().sqrt()) for each in (root, fresh_root)
            )
        root, fresh_root = root + SETTINGS["eps"], fresh_root + SETTINGS["eps"]
        direction = mean / of_mean / root + decay * weight
        if update <= FREEZE:
            ratio = float(
                (weight.norm() / direction.norm()).clamp(SETTINGS["min_coeff"], SETTINGS["max_coeff"])
            )
            trust = ratio if trust is None else 0.7 * trust + 0.3 * ratio
            step = ratio
        else:
            largest = float((root / fresh_root)[square > 0].max())
            limited = min(max(largest, SETTINGS["factor_min"]), SETTINGS["factor_max"])
            factor = min(max(limited, factor * 0.95), factor * 1.05)
            factors.append(factor)
            step = trust * factor
        weight = weight - SETTINGS["lr"] * step * direction
        weights.append(weight)
    return weights, factors


def train(group: Group, *, bias_correction: bool) -> tuple[list[list[Tensor]], list[list[float]]]:
    groups = start()
    optimizer = OneBitLamb(
        groups, **SETTINGS, freeze_step=FREEZE, bias_correction=bias_correction, data_group=group
    )
    weights, found, factors = [each["params"][0] for each in groups], [], []
    for update in range(1, UPDATES + 1):
        assert optimizer.averages_itself == (update > FREEZE)
        for index, weight in enumerate(weights):
            all_ranks = [gradients_of(rank, update)[index] for rank in range(group.size)]
            own = all_ranks[group.rank]
            weight.grad = own if optimizer.averages_itself else torch.stack(all_ranks).mean(dim=0)
        optimizer.step()
        found.append([weight.detach().clone() for weight in weights])
        if update > FREEZE:
            factors.append([float(optimizer.state[weight]["last_factor"]) for weight in weights])
    return found, factors


def train_here(bias_correction: bool) -> list:
    size = torch.distributed.get_world_size()
    rank = torch.distributed.get_rank()
    group = Group(rank, size, torch.distributed.group.WORLD, tuple(range(size)))
    weights, factors = train(group, bias_correction=bias_correction)
    return [[[weight.tolist() for weight in update] for update in weights], factors]


def compare(weights, factors, ranks: int, *, bias_correction: bool) -> None:
    for index in range(len(LENGTHS)):
        expected, expected_factors = by_paper(ranks, index, bias_correction=bias_correction)
        for one, other in zip(weights, expected, strict=True):
            assert torch.allclose(torch.as_tensor(one[index]).double(), other, atol=2e-5)
        assert [each[index] for each in factors] == pytest.approx(expected_factors, rel=1e-4)
        # The limits are reached, and the factor is not one.
        assert max(expected_factors) == SETTINGS["factor_max"]
        assert expected_factors[0] == 1.05


@pytest.mark.parametrize("bias_correction", [True, False])
def test_one_rank_follows_the_paper(bias_correction):
    compare(*train(SINGLE_RANK, bias_correction=bias_correction), 1, bias_correction=bias_correction)


def test_two_ranks_follow_the_paper_with_equal_weights():
    first, second = run_ranks(train_here, size=2, bias_correction=True)
    assert first == second
    compare(*first, 2, bias_correction=True)


def test_it_is_lamb_to_the_last_bit_before_the_freeze():
    ours, theirs = start(), start()
    optimizers = (OneBitLamb(ours, **SETTINGS, freeze_step=FREEZE), Lamb(theirs, **LAMB))
    equal = []
    for update in range(1, FREEZE + 2):
        for groups, optimizer in zip((ours, theirs), optimizers, strict=True):
            for group, gradient in zip(groups, gradients_of(0, update), strict=True):
                group["params"][0].grad = gradient
            optimizer.step()
        equal.append(all(torch.equal(one["params"][0], other["params"][0])
                         for one, other in zip(ours, theirs, strict=True)))  # fmt: skip
    assert equal == [True] * FREEZE + [False]


def test_a_rare_row_does_not_explode_after_the_freeze():
    weight = torch.nn.Parameter(torch.ones(2, 8))
    optimizer = OneBitLamb([{"params": [weight], "weight_decay": 0.0}], **SETTINGS, freeze_step=300)
    for update in range(301):
        weight.grad = torch.randn(2, 8, generator=torch.Generator().manual_seed(update))
        weight.grad[1] *= update in (0, 300)
        before = weight.detach().clone()
        optimizer.step()
    common, rare = (weight - before).detach().abs().amax(dim=1).tolist()
    ratio = float(optimizer.state[weight]["trust_average"] * optimizer.state[weight]["last_factor"])
    assert common < 3 * SETTINGS["lr"] * ratio
    assert 0 < rare < 10 * SETTINGS["lr"] * ratio

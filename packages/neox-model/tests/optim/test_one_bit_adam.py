"""1-bit Adam against Adam before its freeze, and against a plain float64 reading of its paper after it."""

import pytest
import torch
from torch import Tensor

from neox_model.optim.adam import adam
from neox_model.optim.one_bit_adam import OneBitAdam
from neox_model.parallel.compressed_average import part_length
from neox_model.parallel.groups import SINGLE_RANK, Group
from support.distributed import run_ranks
from support.one_bit import PlainAverage

SETTINGS = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6}
FREEZE, UPDATES, LENGTH, DECAY = 3, 8, 37, 0.2
NO_GRADIENT = slice(5, 9)


def gradient_of(rank: int, update: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + update)
    gradient = torch.randn(LENGTH, generator=generator)
    if update <= FREEZE:
        gradient[NO_GRADIENT] = 0
    return gradient


def start() -> list[dict]:
    weight = torch.nn.Parameter(torch.randn(LENGTH, generator=torch.Generator().manual_seed(7)))
    return [{"params": [weight], "weight_decay": DECAY}]


def by_paper(ranks: int, *, bias_correction: bool) -> list[Tensor]:
    """Algorithm 1 of the paper for all ranks in float64: the weights after every update."""
    (beta1, beta2), weight = SETTINGS["betas"], start()[0]["params"][0].detach().double()
    mean, square, found = torch.zeros_like(weight), torch.zeros_like(weight), []
    average = PlainAverage(LENGTH, replicas=ranks, part=part_length(LENGTH, ranks))
    for update in range(1, UPDATES + 1):
        gradients = [gradient_of(rank, update).double() for rank in range(ranks)]
        if update <= FREEZE:
            gradient = torch.stack(gradients).mean(dim=0)
            mean = beta1 * mean + (1 - beta1) * gradient
            square = beta2 * square + (1 - beta2) * gradient**2
        else:
            local = [beta1 * mean + (1 - beta1) * gradient for gradient in gradients]
            local = [each * (square > 0) for each in local]
            mean = average(local, square > 0) if ranks > 1 else local[0]
        of_mean, of_square = 1 - beta1**update, 1 - beta2 ** min(update, FREEZE)
        if not bias_correction:
            of_mean = of_square = 1.0
        weight = weight * (1 - SETTINGS["lr"] * DECAY)
        weight = weight - SETTINGS["lr"] * (mean / of_mean) / ((square / of_square).sqrt() + SETTINGS["eps"])
        found.append(weight)
    return found


def train(group: Group, *, bias_correction: bool) -> list[Tensor]:
    groups = start()
    optimizer = OneBitAdam(
        groups, **SETTINGS, freeze_step=FREEZE, bias_correction=bias_correction, data_group=group
    )
    weight, found = groups[0]["params"][0], []
    for update in range(1, UPDATES + 1):
        assert optimizer.averages_itself == (update > FREEZE)
        if optimizer.averages_itself:
            weight.grad = gradient_of(group.rank, update)
        else:
            weight.grad = torch.stack([gradient_of(rank, update) for rank in range(group.size)]).mean(dim=0)
        optimizer.step()
        found.append(weight.detach().clone())
    return found


def train_here(bias_correction: bool) -> list[list[float]]:
    size = torch.distributed.get_world_size()
    rank = torch.distributed.get_rank()
    group = Group(rank, size, torch.distributed.group.WORLD, tuple(range(size)))
    return [weight.tolist() for weight in train(group, bias_correction=bias_correction)]


@pytest.mark.parametrize("bias_correction", [True, False])
def test_one_rank_follows_the_paper(bias_correction):
    expected = by_paper(1, bias_correction=bias_correction)
    for one, other in zip(train(SINGLE_RANK, bias_correction=bias_correction), expected, strict=True):
        assert torch.allclose(one.double(), other, atol=1e-5)


def test_two_ranks_follow_the_paper_with_equal_weights():
    expected = by_paper(2, bias_correction=True)
    alone = by_paper(1, bias_correction=True)
    first, second = run_ranks(train_here, size=2, bias_correction=True)
    assert first == second
    for one, other in zip(first, expected, strict=True):
        assert torch.allclose(torch.tensor(one).double(), other, atol=1e-5)
    assert not torch.allclose(expected[-1], alone[-1], atol=1e-2)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_it_is_adam_to_the_last_bit_before_the_freeze(bias_correction):
    ours, theirs = start(), start()
    optimizers = (
        OneBitAdam(ours, **SETTINGS, bias_correction=bias_correction, freeze_step=FREEZE),
        adam(theirs, **SETTINGS, bias_correction=bias_correction),
    )
    equal = []
    for update in range(1, FREEZE + 2):
        for groups, optimizer in zip((ours, theirs), optimizers, strict=True):
            groups[0]["params"][0].grad = gradient_of(0, update)
            optimizer.step()
        equal.append(torch.equal(ours[0]["params"][0], theirs[0]["params"][0]))
    assert equal == [True] * FREEZE + [False]


def states_after(updates: int, *, freeze: int) -> tuple[OneBitAdam, Tensor]:
    groups = start()
    optimizer = OneBitAdam(groups, **SETTINGS, freeze_step=freeze)
    weight = groups[0]["params"][0]
    for update in range(1, updates + 1):
        weight.grad = gradient_of(0, update)
        optimizer.step()
    return optimizer, weight


def test_elements_without_a_gradient_before_the_freeze_only_decay():
    optimizer, weight = states_after(FREEZE, freeze=FREEZE)
    before = weight.detach().clone()
    weight.grad = torch.ones(LENGTH)
    optimizer.step()
    assert torch.equal(weight[NO_GRADIENT], before[NO_GRADIENT] * (1 - SETTINGS["lr"] * DECAY))
    assert (weight - before)[:5].abs().min() > 1e-4


def test_the_count_of_updates_is_that_of_the_states():
    optimizer, weight = states_after(FREEZE, freeze=FREEZE)
    assert optimizer.averages_itself
    # As a checkpoint does, which replaces the state.
    optimizer.state[weight]["step"] = torch.tensor(1.0)
    assert not optimizer.averages_itself
    optimizer.state.clear()
    assert not optimizer.averages_itself


def test_a_later_freeze_ends_a_frozen_phase():
    optimizer, weight = states_after(FREEZE + 1, freeze=FREEZE)
    other = OneBitAdam(start(), **SETTINGS, freeze_step=FREEZE + 2)
    target = other.param_groups[0]["params"][0]
    other.state[target] = dict(optimizer.state[weight])
    assert other.state[target]["frozen_step"] == FREEZE
    frozen = other.state[target]["exp_avg_sq"].clone()
    for _ in range(2):
        target.grad = gradient_of(0, 9)
        other.step()
    assert not torch.equal(other.state[target]["exp_avg_sq"], frozen)
    assert other.state[target]["frozen_step"] == FREEZE + 2

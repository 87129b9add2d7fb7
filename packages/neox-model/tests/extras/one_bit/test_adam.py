"""1-bit Adam against Adam before its freeze, and against a plain float64 reading of its paper after it."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from neox_model.extras.one_bit.adam import OneBitAdam
from neox_model.optim.adam import adam
from neox_model.parallel.groups import SINGLE_RANK, Group, part_length
from support.distributed import run_ranks
from support.one_bit import PlainAverage

SETTINGS = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6}
FREEZE, UPDATES, LENGTH, DECAY = 3, 8, 37, 0.2
NO_GRADIENT, TINY_GRADIENT = slice(5, 9), slice(12, 15)


def gradient_of(rank: int, update: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + update)
    gradient = torch.randn(LENGTH, generator=generator)
    if update <= FREEZE:
        gradient[NO_GRADIENT] = 0
        gradient[TINY_GRADIENT] *= 1e-5
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
        root = (square / of_square).sqrt()
        if update > FREEZE:
            # Beyond the paper: no root is less than a tenth of the root of the mean.
            root = root.maximum(0.1 * (square / of_square).mean().sqrt())
        weight = weight - SETTINGS["lr"] * (mean / of_mean) / (root + SETTINGS["eps"])
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


def updates_of_a_rare_row() -> list[float]:
    """Return the largest changes of a common and a rare row long after the rare one's only gradient."""
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    group = Group(rank, size, torch.distributed.group.WORLD, tuple(range(size)))
    weight = torch.nn.Parameter(torch.zeros(4, 64))
    optimizer = OneBitAdam(
        [{"params": [weight], "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        freeze_step=1000,
        data_group=group,
    )
    for update in range(1001):
        frozen = optimizer.averages_itself
        seed = 2 * update + (rank if frozen else 0)
        weight.grad = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
        weight.grad[1] *= update == 0
        before = weight.detach().clone()
        optimizer.step()
    assert 0 < optimizer.state[weight]["exp_avg_sq"][1].max() < 1e-18
    return (weight - before).detach().abs().amax(dim=1).tolist()[:2]


def test_a_rare_row_does_not_explode_after_the_freeze():
    for common, rare in run_ranks(updates_of_a_rare_row, size=2):
        assert common < 3e-3
        # At most ten times the update of an element with the root mean square.
        assert 0 < rare < 1e-2


def test_states_can_be_loaded_by_torchs_own_method():
    optimizer, weight = states_after(FREEZE - 1, freeze=FREEZE)
    other = OneBitAdam(start(), **SETTINGS, freeze_step=FREEZE)
    target = other.param_groups[0]["params"][0]
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    target.data.copy_(weight)
    for update in range(FREEZE, UPDATES):
        assert other.averages_itself == (update > FREEZE)
        for each, one in ((weight, optimizer), (target, other)):
            each.grad = gradient_of(0, update)
            one.step()
        assert torch.equal(weight, target)


def test_weights_whose_gradients_begin_later_do_not_delay_the_freeze():
    late, early = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = OneBitAdam([{"params": [late, early], "weight_decay": 0.0}], **SETTINGS, freeze_step=FREEZE)
    for update in range(FREEZE):
        early.grad = torch.ones(3)
        late.grad = torch.ones(3) if update else None
        optimizer.step()
    optimizer.state = type(optimizer.state)(
        dict, {each: dict(optimizer.state[each]) for each in (late, early)}
    )
    for state in optimizer.state.values():
        state["step"] = state["step"].clone()
    assert optimizer.averages_itself

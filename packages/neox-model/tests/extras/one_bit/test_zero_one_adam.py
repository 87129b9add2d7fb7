"""0/1 Adam against Adam before it skips anything, and against a plain float64 reading of its paper."""

import pytest
import torch
from torch import Tensor

from neox_config.extras.one_bit.intervals import Intervals
from neox_model.extras.one_bit.zero_one_adam import ZeroOneAdam
from neox_model.optim.adam import adam
from neox_model.parallel.groups import SINGLE_RANK, Group, part_length
from support.distributed import run_ranks
from support.one_bit import PlainAverage

BETAS, EPS, DECAY, LENGTH, UPDATES = (0.8, 0.9), 1e-6, 0.2, 37, 26
# Adam to 3, then the variance in 5, 7 and 9; from 11 it is frozen; local steps from 15.
INTERVALS = {"var_freeze_step": 10, "var_update_scaler": 3, "local_step_scaler": 4, "local_step_clipper": 4}
VARIANCE = [1, 2, 3, 5, 7, 9]
SYNCHRONIZED = [*range(1, 15), 16, 18, 20, 24]


def test_the_variance_is_updated_at_intervals_that_double_until_it_is_frozen():
    intervals = Intervals(**INTERVALS)
    assert [update for update in range(1, 99) if intervals.updates_variance(update)] == VARIANCE
    default = Intervals()
    found = [update for update in range(1, 121) if default.updates_variance(update)]
    assert found == [*range(1, 17), *range(18, 49, 2), *range(52, 113, 4), 120]
    assert default.updates_variance(98_288)
    assert not default.updates_variance(100_001)


def test_the_interval_between_synchronizations_doubles_up_to_its_limit():
    intervals = Intervals(**INTERVALS)
    assert [update for update in range(1, UPDATES + 1) if intervals.synchronizes(update)] == SYNCHRONIZED
    large = Intervals(var_freeze_step=10, local_step_scaler=1, local_step_clipper=5)
    assert [update for update in range(11, 41) if large.synchronizes(update)] == [11, 12, *range(15, 41, 5)]
    assert all(
        Intervals(var_freeze_step=1, local_step_scaler=1, local_step_clipper=1).synchronizes(n)
        for n in range(9)
    )
    assert not large.synchronizes(10**18 + 1)
    for each in (intervals, large, Intervals(var_freeze_step=3, local_step_scaler=2, local_step_clipper=100)):
        for last in range(60):
            expected = max(update for update in range(last + 1) if each.synchronizes(update))
            assert each.last_synchronized(last) == expected
    never = Intervals(var_freeze_step=1, local_step_scaler=1, local_step_clipper=10**18)
    assert never.last_synchronized(10**18 - 1) < 10**18


READING = ("item", "tolist", "__float__", "__int__", "__bool__", "cpu")


def test_after_the_first_updates_nothing_is_read_back_from_the_device(monkeypatch):
    """Where counts are on the device, each of these calls would wait for it."""
    groups = start()
    optimizer = ZeroOneAdam(groups, lr=0.01, betas=BETAS, **INTERVALS)
    for update in range(1, UPDATES + 1):
        groups[0]["params"][0].grad = gradient_of(0, update)
        optimizer.step()
        if update == 1:
            assert optimizer.averages_itself is False  # The count has been read.
            for name in READING:
                monkeypatch.setattr(Tensor, name, None)
    assert optimizer.replicas_differ


def gradient_of(rank: int, update: int) -> Tensor:
    gradient = torch.randn(LENGTH, generator=torch.Generator().manual_seed(1000 * rank + update))
    gradient[5:9] = 0
    return gradient


def rate_of(update: int) -> float:
    """Return a learning rate with a warmup from zero."""
    return 0.01 * min(1.0, (update - 1) / 4)


def start() -> list[dict]:
    weight = torch.nn.Parameter(torch.randn(LENGTH, generator=torch.Generator().manual_seed(7)))
    return [{"params": [weight], "weight_decay": DECAY}]


def by_paper(ranks: int, *, bias_correction: bool) -> list[list[Tensor]]:
    """Algorithm 1 of the paper for all ranks in float64: each rank's weights after every update.

    Beyond the paper: decoupled decay, Adam's bias correction, a smallest root, and the full-precision average
    of the gradients where the variance is updated.
    """
    (beta1, beta2), zero = BETAS, torch.zeros(LENGTH, dtype=torch.float64)
    x = [start()[0]["params"][0].detach().double()] * ranks
    m, u, square, of_square, last, rates = [zero] * ranks, [zero] * ranks, zero, 0, x[0], 0.0
    average, found = PlainAverage(LENGTH, replicas=ranks, part=part_length(LENGTH, ranks)), []
    for t in range(1, UPDATES + 1):
        g = [gradient_of(rank, t).double() for rank in range(ranks)]
        if t in VARIANCE:
            g = [torch.stack(g).mean(dim=0)] * ranks
            square, of_square = beta2 * square + (1 - beta2) * g[0] ** 2, of_square + 1
        m = [beta1 * each + (1 - beta1) * gradient for each, gradient in zip(m, g, strict=True)]
        gamma = rate_of(t) / (1 - beta1**t if bias_correction else 1.0)
        v = square / (1 - beta2**of_square if bias_correction else 1.0)
        root = v.sqrt() if t <= 3 else v.sqrt().maximum(0.1 * v.mean().sqrt())
        kept = 1 - rate_of(t) * DECAY
        last, rates = last * kept, rates * kept + gamma
        u = [each * kept + gamma * momentum for each, momentum in zip(u, m, strict=True)]
        if t in SYNCHRONIZED:
            if t not in VARIANCE and ranks > 1:
                # The paper averages u; of an interval with one rate, this is the same.
                m = [average([each / rates for each in u], square > 0)] * ranks
            elif t not in VARIANCE:
                m = [each / rates for each in u]
            last = last - rates * m[0] / (root + EPS)
            x, u, rates = [last] * ranks, [zero] * ranks, 0.0
        else:
            x = [last - each / (root + EPS) for each in u]
        found.append(x)
    return found


def train(group: Group, *, bias_correction: bool, restart: bool = False) -> tuple[list[Tensor], ZeroOneAdam]:
    groups = start()
    settings = {"lr": 0.01, "betas": BETAS, "eps": EPS, "bias_correction": bias_correction, **INTERVALS}
    optimizer = ZeroOneAdam(groups, **settings, data_group=group)
    weight, found = groups[0]["params"][0], []
    for update in range(1, UPDATES + 1):
        assert optimizer.averages_itself == (update not in VARIANCE)
        gradients = [gradient_of(rank, update) for rank in range(group.size)]
        weight.grad = gradients[group.rank] if update not in VARIANCE else torch.stack(gradients).mean(dim=0)
        optimizer.param_groups[0]["lr"] = rate_of(update)
        optimizer.step()
        assert optimizer.replicas_differ == (update not in SYNCHRONIZED)
        found.append(weight.detach().clone())
        if restart:
            # As a checkpoint does: the shared weights and the states are all that remains.
            shared, state = optimizer.shared_weight(weight).clone(), dict(optimizer.state[weight])
            optimizer = ZeroOneAdam(groups, **settings, data_group=group)
            weight.data.copy_(shared)
            optimizer.state[weight] = state
            optimizer.restore_weights()
            assert torch.equal(weight, found[-1])
            with optimizer.shared_weights():
                assert torch.equal(weight, shared)
            assert torch.equal(weight, found[-1])
    return found, optimizer


def train_here(bias_correction: bool) -> dict[str, list]:
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    group = Group(rank, size, torch.distributed.group.WORLD, tuple(range(size)))
    found, optimizer = train(group, bias_correction=bias_correction)
    again, _ = train(group, bias_correction=bias_correction, restart=True)
    return {
        "weights": [weight.tolist() for weight in found],
        "again": [weight.tolist() for weight in again],
        "states": [sorted(state) for state in optimizer.state.values()],
    }


@pytest.mark.parametrize("bias_correction", [True, False])
def test_one_rank_follows_the_paper(bias_correction):
    expected = by_paper(1, bias_correction=bias_correction)
    found, _ = train(SINGLE_RANK, bias_correction=bias_correction)
    for one, [other] in zip(found, expected, strict=True):
        assert torch.allclose(one.double(), other, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_follow_the_paper_and_continue_from_shared_weights_and_states(ranks):
    expected = by_paper(ranks, bias_correction=True)
    results = run_ranks(train_here, size=ranks, bias_correction=True)
    for rank, result in enumerate(results):
        assert result["again"] == result["weights"]
        for one, other in zip(result["weights"], expected, strict=True):
            assert torch.allclose(torch.tensor(one).double(), other[rank], atol=2e-5)
        assert {"local_update", "local_exp_avg", "local_rate", "worker_error"} <= set(result["states"][0])
        assert "exp_avg" not in result["states"][0]
    one, other = (result["weights"] for result in results[:2])
    equal = [update for update in range(1, UPDATES + 1) if one[update - 1] == other[update - 1]]
    assert equal == SYNCHRONIZED


@pytest.mark.parametrize("bias_correction", [True, False])
def test_it_is_adam_to_the_last_bit_before_an_update_of_the_variance_is_skipped(bias_correction):
    ours, theirs = start(), start()
    settings = {"lr": 0.01, "betas": BETAS, "eps": EPS, "bias_correction": bias_correction}
    optimizers = ZeroOneAdam(ours, **settings, **INTERVALS), adam(theirs, **settings)
    equal = []
    for update in range(1, 6):
        for groups, optimizer in zip((ours, theirs), optimizers, strict=True):
            groups[0]["params"][0].grad = gradient_of(0, update)
            optimizer.step()
        equal.append(torch.equal(ours[0]["params"][0], theirs[0]["params"][0]))
    assert equal == [True] * 3 + [False] * 2


def test_without_a_learning_rate_local_steps_keep_the_momentum():
    groups = start()
    optimizer = ZeroOneAdam(
        groups, lr=0.01, betas=BETAS, var_freeze_step=1, local_step_scaler=1, local_step_clipper=2
    )
    weight = groups[0]["params"][0]
    for update in range(1, 7):
        weight.grad = gradient_of(0, update)
        optimizer.param_groups[0]["lr"] = 0.01 if update < 5 else 0.0
        if update == 5:
            before = weight.detach().clone()
        optimizer.step()
    assert torch.equal(weight, before)
    assert optimizer.state[weight]["exp_avg"].abs().sum() > 0


def test_local_steps_end_by_a_synchronization_where_the_variance_is_not_frozen_any_more():
    found, optimizer = train(SINGLE_RANK, bias_correction=True)
    assert optimizer.replicas_differ
    weight = optimizer.param_groups[0]["params"][0]
    later = ZeroOneAdam(
        optimizer.param_groups, lr=0.01, betas=BETAS, var_freeze_step=99, var_update_scaler=99
    )
    weight.data.copy_(optimizer.shared_weight(weight))
    later.state[weight] = optimizer.state[weight]
    later.restore_weights()
    assert torch.equal(weight, found[-1])
    for averages in (True, False):
        assert later.averages_itself == averages
        weight.grad = gradient_of(0, 1)
        later.step()
        assert not later.replicas_differ
    assert "local_rate" not in later.state[weight]
    assert later.state[weight]["frozen_step"] == len(VARIANCE) + 1

"""Optimizers that need whole weights: two tensor-parallel ranks make the updates of one."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from neox_model.optim.lamb import Lamb
from neox_model.optim.muon import Muon
from neox_model.optim.one_bit_lamb import OneBitLamb
from neox_model.optim.param_groups import split_by_kind
from neox_model.optim.sm3 import SM3
from neox_model.optim.split_weights import whole_norms
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import logical_parameter, master_weight
from support.distributed import run_ranks

# Shape and split dimension; the first needs a row of padding on the second rank.
WEIGHTS = (((5, 4), 0), ((4, 6), 0), ((3, 8), 1), ((2, 2), 0), ((6,), 0), ((3,), None))
UPDATES = 3

BUILDERS: dict[str, Callable[..., Optimizer]] = {
    "lamb": partial(Lamb, lr=0.1),
    "1-bit lamb": partial(OneBitLamb, lr=0.1, freeze_step=1, eps=1e-3, factor_threshold=0.9),
    "muon": partial(Muon, lr=0.1),
    "sm3": partial(SM3, lr=0.1),
    "sm3 with momentum": partial(SM3, lr=0.1, beta=0.9, momentum=0.8),
}


def whole_values(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(shape, generator=generator) for shape, _ in WEIGHTS]


def train(kind: str, group: Group) -> list[list]:
    """Return this rank's weights after some updates, of masters, as in 16 bit."""
    masters, blocks = [], []
    for (shape, dim), values in zip(WEIGHTS, whole_values(0), strict=True):
        parameter = logical_parameter(
            shape, init=lambda tensor, generator: None, group=group, split_dim=dim, pad=True
        )
        blocks.append(tuple(slice(*bounds) for bounds in parameter.logical.slices))
        parameter.data.zero_()
        _held(parameter.data, blocks[-1]).copy_(values[blocks[-1]])
        masters.append(master_weight(parameter))
    groups = [{"params": masters[::2], "weight_decay": 0.2}, {"params": masters[1::2], "weight_decay": 0.0}]
    if kind == "muon":
        # As the vocabulary, which is no matrix of Muon, only the first has padding.
        groups = split_by_kind(groups, {id(master) for master in masters[1:4]})
    optimizer = BUILDERS[kind](groups, model_group=group)
    for number in range(1, UPDATES + 1):
        for master, block, values in zip(masters, blocks, whole_values(number), strict=True):
            master.grad = torch.zeros_like(master)
            _held(master.grad, block).copy_(values[block])
        optimizer.step()
    return [_held(master.detach(), block).tolist() for master, block in zip(masters, blocks, strict=True)]


def _held(tensor: Tensor, block: tuple[slice, ...]) -> Tensor:
    """Return a local tensor without its padding."""
    return tensor[tuple(slice(0, bounds.stop - bounds.start) for bounds in block)]


def train_on_each_rank() -> dict[str, list[list]]:
    from neox_model.parallel.topology import create_groups

    group = create_groups(2, 0).model
    return {kind: train(kind, group) for kind in BUILDERS}


def test_two_ranks_make_the_updates_of_one():
    ranks = run_ranks(train_on_each_rank, size=2)
    for kind in BUILDERS:
        alone = [torch.tensor(values) for values in train(kind, SINGLE_RANK)]
        for number, (_, dim) in enumerate(WEIGHTS):
            assert not torch.equal(alone[number], whole_values(0)[number])
            parts = [torch.tensor(found[kind][number]) for found in ranks]
            joined = parts[0] if dim is None else torch.cat(parts, dim)
            torch.testing.assert_close(joined, alone[number], rtol=1e-5, atol=1e-6)


def positions_agree(copies: int) -> bool:
    """Return True if copies of a split weight have the same norms at all positions of a list."""
    from neox_model.parallel.topology import create_groups

    group = create_groups(3, 0).model
    weight = logical_parameter((3, 2), init=lambda tensor, generator: None, group=group, split_dim=0)
    parts = torch.rand(3, 100, generator=torch.Generator().manual_seed(4))
    norms = whole_norms([weight] * copies, parts[group.rank].expand(copies, 100), group)
    return bool((norms == norms[0]).all())


def test_the_norm_of_a_weight_does_not_depend_on_its_position():
    """Copies on pipeline stages are at different positions, and must remain copies."""
    assert run_ranks(positions_agree, size=3, copies=300) == [True] * 3

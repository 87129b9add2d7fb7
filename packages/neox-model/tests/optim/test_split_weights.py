"""Optimizers that need whole weights: ranks with parts of them make the updates of one."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from neox_model.extras.one_bit.lamb import OneBitLamb
from neox_model.optim.lamb import Lamb
from neox_model.optim.muon import Muon
from neox_model.optim.param_groups import split_by_kind
from neox_model.optim.row_exchange import RowExchange
from neox_model.optim.sm3 import SM3
from neox_model.optim.split_weights import whole_norms
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import RowBlocks, copy_description, logical_parameter, master_weight
from neox_model.parallel.param_shard import first_row
from support.distributed import run_ranks

# Shape and split dimension; the first needs a row of padding on the second rank.
WEIGHTS = (
    *(((5, 4), 0), ((4, 6), 0), ((3, 8), 1), ((2, 2), 0), ((6,), 0), ((3,), None), ((3, 5), None)),
    ((16, 5), 0),
    # As matrices of experts: with four ranks, one has none.
    *(((3, 4, 6), 2), ((3, 6, 4), 1)),
)
# Those that Muon makes orthogonal. As the vocabulary, which is not one of them, only the first has padding.
MATRICES = (1, 2, 3, 6, 7, 8, 9)
# Two groups of two queries, a key and a value, of width 2.
BLOCKS = {7: RowBlocks((2, 1, 1), 2)}
MUON = {"row_beta": 0.9, "cautious_decay": True, "scale": "match_rms_adamw"}
UPDATES = 3

BUILDERS: dict[str, Callable[..., Optimizer]] = {
    "lamb": partial(Lamb, lr=0.1),
    "1-bit lamb": partial(OneBitLamb, lr=0.1, freeze_step=1, eps=1e-3, factor_threshold=0.9),
    "muon": partial(Muon, lr=0.1, iteration_dtype=torch.float32),
    "muon, together": partial(Muon, lr=0.1, qkv="together", coefficients="quintic"),
    "muon, rows": partial(Muon, lr=0.1, iteration_dtype=torch.float32, **MUON),
    "muon, heads": partial(Muon, lr=0.1, iteration_dtype=torch.float32, qkv="per_head", **MUON),
    "sm3": partial(SM3, lr=0.1),
    "sm3 with momentum": partial(SM3, lr=0.1, beta=0.9, momentum=0.8),
}


def whole_values(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(shape, generator=generator) for shape, _ in WEIGHTS]


def train(kind: str, group: Group, rows: Group = SINGLE_RANK) -> list[list]:
    """Return this rank's parts of the weights after some updates, of masters, as in 16 bit.

    Args:
        kind: a key of BUILDERS.
        group: the tensor-parallel ranks.
        rows: the ranks that divide the rows of all weights.
    """
    held, blocks = [], []
    for number, ((shape, dim), values) in enumerate(zip(WEIGHTS, whole_values(0), strict=True)):
        parameter = logical_parameter(
            shape,
            init=lambda tensor, generator: None,
            group=group,
            split_dim=dim,
            pad=True,
            blocks=BLOCKS.get(number),
        )
        block = tuple(slice(*bounds) for bounds in parameter.logical.slices)
        parameter.data.zero_()
        _held(parameter.data, block).copy_(values[block])
        run = [first_row(len(parameter), rank=rows.rank + each, size=rows.size) for each in (0, 1)]
        part = master_weight(parameter)
        part.data = part.data[slice(*run)].clone()
        copy_description(parameter, part, rows=(run[0], run[1]))
        held.append(part)
        blocks.append(tuple(slice(*bounds) for bounds in part.logical.slices))
    groups = [{"params": held[::2], "weight_decay": 0.2}, {"params": held[1::2], "weight_decay": 0.0}]
    if kind.startswith("muon"):
        groups = split_by_kind(groups, {id(held[number]) for number in MATRICES})
    joined = {} if kind == "1-bit lamb" else {"row_group": rows}
    optimizer = BUILDERS[kind](groups, model_group=group, **joined)
    for number in range(1, UPDATES + 1):
        for part, block, values in zip(held, blocks, whole_values(number), strict=True):
            part.grad = torch.zeros_like(part)
            _held(part.grad, block).copy_(values[block])
        optimizer.step()
    return [_held(part.detach(), block).tolist() for part, block in zip(held, blocks, strict=True)]


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


# Kind -> what joins the parts of its weights. With the fault, nothing is sent.
FAULTS: dict[str, Callable] = {
    "lamb": lambda: patch("neox_model.optim.split_weights._joined_norms", lambda norms, group: norms),
    "muon": lambda: patch.object(RowExchange, "_exchange", lambda self, received, *_: received.normal_()),
    "muon, rows": lambda: patch("neox_model.optim.muon.all_reduce", lambda tensor, group: tensor),
    "sm3": lambda: patch("neox_model.optim.sm3.joined_maxima_", lambda tensors, group: None),
}


def train_rows_on_each_rank(tensor_parallel: int, faulty: bool) -> dict[str, list[list]]:
    from neox_model.parallel.topology import create_groups

    groups = create_groups(tensor_parallel, 0)
    found = {}
    for kind in FAULTS if faulty else [kind for kind in BUILDERS if kind != "1-bit lamb"]:
        with FAULTS[kind]() if faulty else nullcontext():
            found[kind] = train(kind, groups.model, groups.data)
    return found


def joined(ranks: list[dict[str, list[list]]], kind: str, number: int, tensor_parallel: int) -> Tensor:
    """Return a weight, of which the ranks have parts."""
    (_, dim), of_models = WEIGHTS[number], []
    for model in range(tensor_parallel):
        found = [torch.tensor(rank[kind][number]) for rank in ranks[model::tensor_parallel]]
        of_models.append(torch.cat([part for part in found if len(part)]))
    return of_models[0] if dim is None else torch.cat(of_models, dim)


@pytest.mark.parametrize(("rows", "tensor_parallel"), [(2, 1), (4, 1), (2, 2)])
def test_ranks_with_some_rows_make_the_updates_of_one(rows, tensor_parallel):
    """Of four ranks some have fewer rows of a weight than others, or none."""
    ranks = run_ranks(
        train_rows_on_each_rank, size=rows * tensor_parallel, tensor_parallel=tensor_parallel, faulty=False
    )
    for kind in ranks[0]:
        alone = [torch.tensor(values) for values in train(kind, SINGLE_RANK)]
        for number, expected in enumerate(alone):
            found = joined(ranks, kind, number, tensor_parallel)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_does_not_join_rows_is_found():
    ranks = run_ranks(train_rows_on_each_rank, size=2, tensor_parallel=1, faulty=True)
    for kind in FAULTS:
        alone = [torch.tensor(values) for values in train(kind, SINGLE_RANK)]
        apart = [(joined(ranks, kind, each, 1) - values).abs().max() for each, values in enumerate(alone)]
        assert max(apart) > 1e-3, kind


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

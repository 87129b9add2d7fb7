"""Partitioned parameters on three ranks, whose rows do not divide: what each holds, and its gradients."""

from typing import Any

import torch
from torch import nn

from support.distributed import run_ranks

ROWS = {"wide": 5, "narrow": 1}
# Rows of three ranks: equally many on all but the last.
HELD = {"wide": [(0, 2), (2, 4), (4, 5)], "narrow": [(0, 1), (1, 1), (1, 1)]}


class Block(nn.Module):
    """Has a parameter of every number of rows."""

    def __init__(self) -> None:
        from neox_model.parallel.logical import logical_parameter

        super().__init__()
        for name, rows in ROWS.items():
            setattr(self, name, logical_parameter((rows, 2), init=lambda tensor, generator: None))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.wide.sum() + 2 * self.narrow.sum()) * factor


class Model(nn.Module):
    """Two blocks, of which the second is gathered with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return self.first(factor) + self.second(factor)


def train_sharded(**options: Any) -> dict[str, Any]:
    """Return what this rank holds of the model, and its gradients after an update's two micro-batches."""
    from neox_model.parallel.groups import SINGLE_RANK, Group, Groups
    from neox_model.parallel.logical import without_memory
    from neox_model.parallel.partitioned import is_sharded, own_rows_of, whole_tensor
    from neox_model.parallel.sharding import MeanReduceScatter, Precisions, ShardedModel, partition

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    group = Group(rank, size, torch.distributed.group.WORLD, tuple(range(size)))
    groups = Groups(data=group, model=SINGLE_RANK, pipe=SINGLE_RANK, world=group, control=group)
    with without_memory():
        model = Model()
    assert all(parameter.is_meta for parameter in model.parameters())
    partition(
        model,
        [model.first],
        groups=groups,
        device=torch.device("cpu"),
        precisions=Precisions(computation=torch.float32, accumulation=torch.float32),
        reshards_after_forward=True,
        partitions_frozen=True,
    )
    for number, parameter in enumerate(model.parameters()):
        assert is_sharded(parameter)
        with own_rows_of(parameter) as whole:
            whole.copy_(torch.arange(whole.numel()).view_as(whole) + 100 * number)
    sharded = ShardedModel(
        model,
        groups=groups,
        reduction=lambda copies: MeanReduceScatter(torch.float32, size=copies, divides_first=True),
        keeps_weights=False,
        **options,
    )
    holders = [sharded.holder_of(parameter) for parameter in model.parameters()]
    for is_last in (False, True):
        sharded.begin(is_last=is_last)
        model(torch.tensor(float(rank))).backward()
    sharded.take_gradients()
    found: dict[str, Any] = {"held": [], "values": [], "gradients": [], "whole": []}
    shards = sharded.param_shards_of(holders)
    for (name, parameter), held in zip(model.named_parameters(), shards, strict=True):
        logical = held.holder.logical  # type: ignore[attr-defined]
        found["held"].append([name.split(".")[1], held.start // 2, held.numel // 2, list(logical.slices[0])])
        found["values"].append(held.holder.tolist())
        found["gradients"].append(held.holder.grad.tolist())
        found["whole"].append(whole_tensor(parameter).flatten().tolist())
        # An update of the rows is one of the model.
        held.holder.data.add_(1.0)
        assert torch.equal(whole_tensor(parameter).flatten(), torch.tensor(found["whole"][-1]) + 1.0)
    return found


def check(results: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(results):
        for number, (name, first, rows, block) in enumerate(found["held"]):
            start, stop = HELD[name][rank]
            assert (first, rows) == (start, stop - start)
            assert block == [start, stop]
            expected = [[100.0 * number + 2 * row + column for column in (0, 1)] for row in range(ROWS[name])]
            assert found["values"][number] == expected[start:stop]
            assert found["whole"][number] == [value for row in expected for value in row]
            # The mean of 0, 1 and 2, twice.
            gradient = 2.0 if name == "wide" else 4.0
            assert found["gradients"][number] == [[gradient] * 2] * rows


def test_each_rank_holds_a_run_of_rows_and_their_mean_gradients():
    check(run_ranks(train_sharded, size=3, reduces_every_time=False))


def test_gradients_reduced_in_every_micro_batch_are_summed():
    check(run_ranks(train_sharded, size=3, reduces_every_time=True))

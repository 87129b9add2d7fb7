"""Start weights: the same as those of whole tensors, drawn in pieces of which a rank keeps its block."""

import pytest
import torch
from torch import nn

from neox_model import initialization
from neox_model.initialization import INIT_METHODS, initialize_parameters
from neox_model.parallel.groups import Group
from neox_model.parallel.logical import logical_parameter
from neox_model.parallel.random import mixed_seed

# name -> the same by torch's functions; standard deviation 0.3, hidden size 48, 5 layers.
WHOLE = {
    "normal": lambda tensor, generator: nn.init.normal_(tensor, std=0.3, generator=generator),
    "xavier_normal": lambda tensor, generator: nn.init.xavier_normal_(tensor, generator=generator),
    "xavier_uniform": lambda tensor, generator: nn.init.xavier_uniform_(tensor, generator=generator),
    "orthogonal": lambda tensor, generator: nn.init.orthogonal_(tensor, gain=2**0.5, generator=generator),
}
# A last group that is not full, rows that are no multiple of a group, few elements, one row, long rows.
SHAPES = [(50, 24), (67, 7), (3, 4), (1, 40), (33, 1), (37, 100), (5, 3), (16, 16), (129, 5)]


def block_of(shape: tuple[int, int], *, name: str, rank: int, ranks: int, split_dim: int | None, pad: bool):
    module = nn.Module()
    init = INIT_METHODS[name](0.3, 48, 5)
    group = Group(rank, ranks, None, tuple(range(ranks)))
    module.weight = logical_parameter(shape, init=init, group=group, split_dim=split_dim, pad=pad)
    initialize_parameters(module, seed=7)
    return module.weight


@pytest.mark.parametrize("piece", [32, 2**20])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_a_block_has_the_values_of_the_whole_tensor(monkeypatch, name, shape, piece):
    monkeypatch.setattr(initialization, "_PIECE", piece)
    generator = torch.Generator().manual_seed(mixed_seed("init", 7, "weight"))
    whole = WHOLE[name](torch.empty(shape), generator)
    for ranks, split_dim in ((1, None), (2, 0), (3, 0), (2, 1), (4, 1)):
        if split_dim == 1 and shape[1] % ranks:
            continue
        for rank in range(ranks):
            block = block_of(
                shape, name=name, rank=rank, ranks=ranks, split_dim=split_dim, pad=split_dim == 0
            )
            (top, bottom), (left, right) = block.logical.slices
            expected = torch.zeros_like(block)
            expected[: bottom - top, : right - left] = whole[top:bottom, left:right]
            assert torch.equal(block.detach(), expected)


def test_a_rank_draws_pieces_of_bounded_size_and_none_behind_its_block(monkeypatch):
    monkeypatch.setattr(initialization, "_PIECE", 256)
    sizes: dict[str, list[int]] = {"draw": [], "skip": []}
    for kind, seen in sizes.items():
        usual = getattr(initialization._Drawn, kind)

        def watched(self, part, *others, usual=usual, seen=seen):
            seen.append(part.numel())
            return usual(self, part, *others)

        monkeypatch.setattr(initialization._Drawn, kind, watched)
    block_of((64, 16), name="normal", rank=1, ranks=4, split_dim=0, pad=False)
    assert sizes == {"skip": [256], "draw": [256]}

"""Who is in which group, and which block of which tensor a rank holds: no processes needed."""

import torch
from torch import nn

from neox_config.facts.topology import Topology
from neox_model.errors import LayoutError
from neox_model.initialization import initialize_parameters
from neox_model.parallel.cross_entropy import local_vocabulary
from neox_model.parallel.groups import SINGLE_RANK, Group, Groups
from neox_model.parallel.linear import zero_init
from neox_model.parallel.logical import logical_parameter, named_logical_parameters
from neox_model.parallel.random import mixed_seed, seed_streams
from neox_model.parallel.topology import topology_of_world
from support.refusals import refused


def rank_of(rank: int, size: int) -> Group:
    return Group(rank, size, None, tuple(range(size)))


def count_up(tensor, generator):
    tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))


def test_tensor_ranks_are_neighbours_and_stages_are_far_apart():
    topology = topology_of_world(8, model_parallel_size=2, pipe_parallel_size=2)
    assert topology == Topology(pipe=2, data=2, model=2)
    assert topology.ranks_along("model") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert topology.ranks_along("data") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert topology.ranks_along("pipe") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_a_rank_has_one_place_on_each_axis():
    topology = Topology(pipe=2, data=3, model=2)
    assert [topology.index_along("model", rank) for rank in range(12)] == [0, 1] * 6
    assert [topology.index_along("data", rank) for rank in range(12)] == [0, 0, 1, 1, 2, 2] * 2
    assert [topology.index_along("pipe", rank) for rank in range(12)] == [0] * 6 + [1] * 6


def test_sizes_must_divide_the_world():
    with refused(LayoutError, "model-parallel-size 2", "pipe-parallel-size 2", "4", "the 6"):
        topology_of_world(6, model_parallel_size=2, pipe_parallel_size=2)


def test_a_whole_parameter_is_one_block():
    parameter = logical_parameter((4, 6), init=zero_init)
    assert parameter.shape == (4, 6)
    assert parameter.logical.slices == ((0, 4), (0, 6))
    assert not parameter.logical.model_parallel
    assert not hasattr(parameter, "model_parallel")


def test_a_split_parameter_knows_its_block():
    parameter = logical_parameter((4, 6), init=zero_init, group=rank_of(1, 3), split_dim=1)
    assert parameter.shape == (4, 2)
    assert parameter.logical.shape == (4, 6)
    assert parameter.logical.slices == ((0, 4), (2, 4))
    assert parameter.logical.model_parallel
    assert parameter.model_parallel


def test_a_width_that_does_not_divide_is_refused_unless_padded():
    with refused(LayoutError, "7", "3 tensor-parallel"):
        logical_parameter((7, 2), init=zero_init, group=rank_of(0, 3), split_dim=0)
    rows = [
        logical_parameter((7, 2), init=zero_init, group=rank_of(rank, 3), split_dim=0, pad=True)
        for rank in range(3)
    ]
    assert [tuple(row.shape) for row in rows] == [(3, 2)] * 3
    assert [row.logical.slices[0] for row in rows] == [(0, 3), (3, 6), (6, 7)]
    assert [local_vocabulary(7, rank_of(rank, 3)) for rank in range(3)] == [(0, 3), (3, 6), (6, 7)]


def test_rank_may_have_only_padding():
    parameter = logical_parameter((4, 2), init=zero_init, group=rank_of(3, 4), split_dim=0, pad=True)
    assert parameter.logical.slices[0] == (3, 4)
    parameter = logical_parameter((5, 2), init=zero_init, group=rank_of(3, 4), split_dim=0, pad=True)
    assert parameter.logical.slices[0] == (5, 5)


def test_blocks_are_slices_of_the_whole_and_padding_is_zero():
    whole = torch.arange(14.0).view(7, 2)
    for rank, rows in enumerate([(0, 3), (3, 6), (6, 7)]):
        module = nn.Module()
        module.weight = logical_parameter(
            (7, 2), init=count_up, group=rank_of(rank, 3), split_dim=0, pad=True
        )
        module.weight.data.fill_(-1.0)
        initialize_parameters(module, seed=0)
        held = rows[1] - rows[0]
        assert torch.equal(module.weight[:held], whole[rows[0] : rows[1]])
        assert torch.equal(module.weight[held:], torch.zeros(3 - held, 2))


def test_random_blocks_of_any_split_are_slices_of_one_tensor():
    def start(group: Group, split_dim: int | None) -> torch.Tensor:
        module = nn.Module()
        module.weight = logical_parameter(
            (6, 4), init=lambda t, g: t.normal_(generator=g), group=group, split_dim=split_dim
        )
        initialize_parameters(module, seed=9)
        return module.weight.detach()

    whole = start(SINGLE_RANK, None)
    for dim in (0, 1):
        assert torch.equal(torch.cat([start(rank_of(rank, 2), dim) for rank in range(2)], dim), whole)


def test_logical_names_follow_the_plan():
    model = nn.Module()
    model.stack = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)])
    model.tied = nn.Linear(2, 2, bias=False)
    model.plan_names = {
        "stack.0": "embedding",
        "stack.1": "layers.0",
        "tied.weight": "embedding.words.weight",
    }
    assert [name for name, _ in named_logical_parameters(model)] == [
        "embedding.weight",
        "embedding.bias",
        "layers.0.weight",
        "embedding.words.weight",
    ]


def test_streams_are_shared_by_tensor_ranks_alone():
    def first_number(data: int, model: int, pipe: int) -> float:
        ranks = [rank_of(rank, 4) for rank in (data, model, pipe)]
        seed_streams(5, Groups(ranks[0], ranks[1], ranks[2], SINGLE_RANK, SINGLE_RANK))
        return torch.rand(()).item()

    numbers = {place: first_number(*place) for place in [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1)]}
    assert numbers[0, 0, 0] == numbers[0, 1, 0]
    assert len(set(numbers.values())) == 3


def test_mixed_seed_is_the_same_everywhere():
    assert mixed_seed("init", 1234, "embedding.word_embeddings.weight") == 4197414022646259192
    assert mixed_seed(1, 2) != mixed_seed(12)

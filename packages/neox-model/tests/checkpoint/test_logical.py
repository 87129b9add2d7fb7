"""Optimizer states as logical tensors and single numbers."""

import pytest
import torch
from torch import nn

from neox_model.checkpoint.blocks import block_numel
from neox_model.checkpoint.errors import CheckpointError, DamagedCheckpointError
from neox_model.checkpoint.logical import (
    Fragment,
    check_scalars,
    optimizer_parts,
    restore_scalars,
    state_range,
    state_tensor,
)
from neox_model.optim.sm3 import SM3
from neox_model.parallel.groups import Group
from neox_model.parallel.logical import logical_parameter
from neox_model.parallel.param_shard import ParamShard
from support.refusals import refused


class Counting(torch.optim.SGD):
    """An optimizer that counts in plain numbers, as DeepSpeed's do."""


def fragment_of(holder: torch.Tensor, name: str = "weight") -> Fragment:
    param = logical_parameter((4,), init=lambda tensor, generator: None)
    return Fragment(name, param.logical, ParamShard(param, 0, 4, holder, 0, (4,)))


def test_single_number_states_are_converted_for_the_resumed_optimizer():
    holder = nn.Parameter(torch.zeros(4))
    counting = Counting([holder], lr=0.1)
    counting.state[holder] = {"step": 3, "exp_avg": torch.ones(4), "nothing": None}
    parts, scalars = optimizer_parts(fragment_of(holder), counting)
    assert [part.name for part in parts] == ["weight/exp_avg"]
    assert scalars == {"step": {"value": 3, "dtype": None}, "nothing": {"value": None, "dtype": None}}
    adam = torch.optim.AdamW([holder])
    restore_scalars([fragment_of(holder)], adam, {"weight": {"step": scalars["step"]}}, same_class=False)
    assert torch.equal(adam.state[holder]["step"], torch.tensor(3.0))
    stored = {"weight": {"step": {"value": 3.0, "dtype": "F32"}}}
    restore_scalars([fragment_of(holder)], counting, stored, same_class=False)
    assert counting.state[holder]["step"] == 3
    assert isinstance(counting.state[holder]["step"], int)


def test_weights_of_a_flat_partition_must_have_equal_step_counts():
    holder = nn.Parameter(torch.zeros(8))
    stored = {name: {"step": {"value": step, "dtype": None}} for name, step in (("a", 1), ("b", 2))}
    fragments = [fragment_of(holder, "a"), fragment_of(holder, "b")]
    with refused(CheckpointError, code="different-counts"):
        check_scalars(fragments, stored, same_class=True)


def flat_part() -> Fragment:
    param = logical_parameter((4, 3), init=lambda tensor, generator: None)
    return Fragment(
        "weight", param.logical, ParamShard(param, 0, 12, nn.Parameter(torch.zeros(12)), 0, (4, 3))
    )


def test_states_of_a_whole_weight_do_not_belong_to_a_flat_part_of_it():
    part = flat_part()
    optimizer = torch.optim.Adafactor([part.held.holder])
    optimizer.state[part.held.holder] = {"row_var": torch.zeros(4, 1)}
    with refused(CheckpointError, "'row_var'"):
        optimizer_parts(part, optimizer)
    with refused(CheckpointError, "'row_var'", "0"):
        state_range(part, optimizer, "row_var", (4, 1))


def test_a_state_of_one_element_is_a_number_only_if_it_has_no_dimensions():
    param = logical_parameter((1, 3), init=lambda tensor, generator: None)
    fragment = Fragment("weight", param.logical, ParamShard(param, 0, 3, param, 0, (1, 3)))
    optimizer = torch.optim.Adafactor([param])
    optimizer.state[param] = {"step": torch.tensor(2.0), "row_var": torch.full((1, 1), 5.0)}
    parts, scalars = optimizer_parts(fragment, optimizer)
    assert [(part.name, part.shape, part.block) for part in parts] == [
        ("weight/row_var", (1, 1), ((0, 1), (0, 1)))
    ]
    assert scalars.keys() == {"step"}


def blocks_of_two_ranks(shape, *, split_dim):
    """Return each rank's fragment of a weight with states of SM3 that tell their index."""
    for rank in range(2):
        group = Group(rank, 2, None, (0, 1))
        param = logical_parameter(
            shape, init=lambda tensor, generator: None, group=group, split_dim=split_dim, pad=True
        )
        fragment = Fragment(
            "weight",
            param.logical,
            ParamShard(param, 0, block_numel(param.logical.slices), param, 0, tuple(param.shape)),
        )
        optimizer = SM3([{"params": [param]}], lr=0.1)
        rows, columns = param.shape
        first_row, first_column = (start for start, _ in param.logical.slices)
        optimizer.state[param] = {
            "accumulator_0": (torch.arange(rows) + first_row).reshape(-1, 1).float(),
            "accumulator_1": (torch.arange(columns) + first_column).reshape(1, -1).float(),
        }
        yield fragment, optimizer


@pytest.mark.parametrize("shape", [(5,), (1, 5)])
def test_a_state_along_a_dimension_that_the_weight_lacks_is_damage(shape):
    param = logical_parameter((5,), init=lambda tensor, generator: None)
    fragment = Fragment("weight", param.logical, ParamShard(param, 0, 5, param, 0, (5,)))
    optimizer = SM3([{"params": [param]}], lr=0.1)
    assert state_range(fragment, optimizer, "accumulator_0", (5,)) == (((0, 5),), 0, 5)
    with refused(DamagedCheckpointError, "'accumulator_1'", "dimension 1", code="damaged-manifest"):
        state_range(fragment, optimizer, "accumulator_1", shape)


@pytest.mark.parametrize(
    ("shape", "split_dim"),
    [((4, 3), 0), ((3, 4), 1), ((5, 3), 0), ((3, 2), 1), ((2, 3), 0)],
    ids=["rows", "columns", "rows and padding", "a column each", "a row each"],
)
def test_states_by_row_and_column_are_written_once_and_read_by_any_rank(shape, split_dim):
    """Also where a rank's block is one column, so that a state by row has the shape of the block."""
    ranks = list(blocks_of_two_ranks(shape, split_dim=split_dim))
    written = [part for fragment, optimizer in ranks for part in optimizer_parts(fragment, optimizer)[0]]
    wholes = {"accumulator_0": (shape[0], 1), "accumulator_1": (1, shape[1])}
    for dim, (state, whole) in enumerate(wholes.items()):
        parts = [part for part in written if part.name == f"weight/{state}"]
        assert {part.shape for part in parts} == {whole}
        values = torch.cat([part.values for part in parts])
        assert values.tolist() == list(range(shape[dim]))
        for fragment, optimizer in ranks:
            block, start, stop = state_range(fragment, optimizer, state, whole)
            target = state_tensor(fragment, optimizer, state, whole)
            assert (start, stop) == (0, target.numel())
            assert target.tolist() == list(range(*block[dim]))
            kept = optimizer.state.pop(fragment.held.holder)
            assert state_tensor(fragment, optimizer, state, whole).shape == target.shape
            assert optimizer.state[fragment.held.holder][state].shape == kept[state].shape
            optimizer.state[fragment.held.holder] = kept


def test_a_state_by_row_of_another_shape_is_damage():
    (fragment, optimizer), _ = blocks_of_two_ranks((4, 3), split_dim=0)
    with refused(DamagedCheckpointError, "'accumulator_0'", "(4, 3)", code="damaged-manifest"):
        state_range(fragment, optimizer, "accumulator_0", (4, 3))


@pytest.mark.parametrize(
    ("kind", "options", "device"),
    [
        (torch.optim.ASGD, {}, "meta"),
        (torch.optim.NAdam, {}, "cpu"),
        (torch.optim.AdamW, {}, "cpu"),
        (torch.optim.AdamW, {"capturable": True}, "meta"),
    ],
)
def test_single_numbers_are_beside_the_weights_if_the_optimizer_expects_it(kind, options, device):
    holder = nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = kind([holder], **options)
    step = {"weight": {"step": {"value": 3.0, "dtype": "F32"}}}
    restore_scalars([fragment_of(holder)], optimizer, step, same_class=True)
    assert optimizer.state[holder]["step"].device.type == device

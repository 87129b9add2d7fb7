"""States that differ between replicas: written by each, and read by any number of replicas and splits."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from neox_model.checkpoint.contents import Layout, Manifest
from neox_model.checkpoint.errors import DamagedCheckpointError
from neox_model.checkpoint.load import _fill_state, _state_ranges
from neox_model.checkpoint.logical import Fragment
from neox_model.checkpoint.replica_states import log_other_replicas, replica_parts
from neox_model.checkpoint.shards import ShardReader, WrittenPiece, records_of, write_shard
from neox_model.parallel.groups import Group, part_length
from neox_model.parallel.logical import logical_parameter
from neox_model.parallel.param_shard import ParamShard
from support.refusals import refused

# Seven rows on two tensor-parallel ranks: the second has a row of padding.
SHAPE = (7, 5)
KINDS = {"worker_error": "own", "server_error": "part", "local_update": "mean"}


def whole_errors(replicas: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(replicas, *SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)


def rank_of(replica: int, replicas: int, split: int, splits: int) -> tuple[Fragment, SimpleNamespace]:
    """Return the fragment of a weight and an optimizer without states, of one rank."""
    model = Group(split, splits, None, tuple(range(splits)))
    parameter = logical_parameter(SHAPE, init=lambda *_: None, group=model, split_dim=0, pad=True)
    parameter.data.zero_()
    held = ParamShard(parameter, 0, parameter.numel(), parameter, 0, tuple(parameter.shape))
    rows = parameter.logical.slices[0]
    held = replace(held, numel=(rows[1] - rows[0]) * SHAPE[1])
    group = Group(replica, replicas, None, tuple(range(replicas)))
    return Fragment("weight", parameter.logical, held), SimpleNamespace(
        replica_states=KINDS, data_group=group, state={parameter: {}}
    )


def block_of(fragment: Fragment, whole: Tensor) -> Tensor:
    """Return what a rank holds of a tensor, with its padding."""
    first, last = fragment.logical.slices[0]
    found = torch.zeros(tuple(fragment.held.holder.shape))
    found[: last - first] = whole[first:last]
    return found


def served_by(fragment: Fragment, whole: Tensor, replica: int, replicas: int) -> Tensor:
    flat = block_of(fragment, whole).view(-1)
    length = part_length(flat.numel(), replicas)
    part = flat[replica * length : (replica + 1) * length]
    return torch.nn.functional.pad(part, (0, length - part.numel()))


def write(folder: Path, replicas: int, splits: int) -> Manifest:
    """Write the states of all ranks."""
    workers, server = whole_errors(replicas)
    pieces: list[WrittenPiece] = []
    files = {}
    for number in range(replicas * splits):
        replica, split = divmod(number, splits)
        fragment, optimizer = rank_of(replica, replicas, split, splits)
        optimizer.state[fragment.held.holder] = {
            "exp_avg": torch.ones(1),
            "worker_error": block_of(fragment, workers[replica]),
            "local_update": block_of(fragment, 2 * workers[replica]),
            "server_error": served_by(fragment, server, replica, replicas),
        }
        written, size = write_shard(folder / f"{number}.safetensors", replica_parts(fragment, optimizer))
        files[f"{number}.safetensors"] = size
        pieces += written
    tensors = records_of(pieces)
    assert tensors.keys() == {f"weight/{key}" for key in KINDS}
    assert all(record.is_complete for record in tensors.values())
    layout = Layout(data=replicas, model=splits, pipe=1)
    return Manifest(iteration=1, layout=layout, config={}, tensors=tensors, files=files)


def read(folder: Path, manifest: Manifest, fragment: Fragment, optimizer: SimpleNamespace) -> dict:
    reader = ShardReader(folder, manifest)
    for key in KINDS:
        _fill_state(fragment, optimizer, key, manifest.tensors[f"weight/{key}"].shape, reader)
    return optimizer.state[fragment.held.holder]


@pytest.mark.parametrize(("replicas", "splits"), [(2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize(("new_replicas", "new_splits"), [(2, 1), (2, 2), (3, 2), (4, 1)])
def test_any_layout_reads_what_any_other_wrote(tmp_path, replicas, splits, new_replicas, new_splits):
    manifest = write(tmp_path, replicas, splits)
    workers, server = whole_errors(replicas)
    for replica in range(new_replicas):
        for split in range(new_splits):
            fragment, optimizer = rank_of(replica, new_replicas, split, new_splits)
            found = read(tmp_path, manifest, fragment, optimizer)
            share = workers[replica::new_replicas].sum(dim=0) * new_replicas / replicas
            expected = block_of(fragment, workers[replica] if replicas == new_replicas else share)
            if replicas == new_replicas:
                assert torch.equal(found["worker_error"], expected)
            assert torch.allclose(found["worker_error"], expected, atol=1e-6)
            assert torch.equal(found["server_error"], served_by(fragment, server, replica, new_replicas))
            mean = 2 * (workers[replica] if replicas == new_replicas else workers.mean(dim=0))
            assert torch.allclose(found["local_update"], block_of(fragment, mean), atol=1e-6)


@pytest.mark.parametrize(("replicas", "new_replicas"), [(2, 4), (3, 2), (4, 2), (5, 3), (2, 3)])
def test_the_mean_error_stays_and_fewer_replicas_read_each_row_once(tmp_path, replicas, new_replicas):
    manifest, found, rows = write(tmp_path, replicas, 1), [], []
    for replica in range(new_replicas):
        fragment, optimizer = rank_of(replica, new_replicas, 0, 1)
        found.append(read(tmp_path, manifest, fragment, optimizer)["worker_error"])
        shape = manifest.tensors["weight/worker_error"].shape
        rows += [block[0][0] for block, _, _ in _state_ranges(fragment, optimizer, "worker_error", shape)]
    assert sorted(rows) == list(range(replicas))
    assert torch.allclose(
        torch.stack(found).mean(dim=0)[:7], whole_errors(replicas)[0].mean(dim=0), atol=1e-6
    )


def test_one_replica_reads_no_errors_and_a_warning_is_logged(tmp_path, caplog):
    manifest = write(tmp_path, 2, 1)
    fragment, optimizer = rank_of(0, 1, 0, 1)
    found = read(tmp_path, manifest, fragment, optimizer)
    assert found.keys() == {"local_update"}
    mean = 2 * whole_errors(2)[0].mean(dim=0)
    assert torch.allclose(found["local_update"], block_of(fragment, mean), atol=1e-6)
    for replicas, message in {
        1: "server_error and worker_error of the checkpoint's 2 replicas: left out",
        3: "server_error and worker_error of the checkpoint's 2 replicas: divided among 3 replicas, "
        "with the same mean",
    }.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            log_other_replicas(manifest, rank_of(0, replicas, 0, 1)[1])
        assert message in caplog.text
        mean_only = "local_update of the checkpoint's 2 replicas: each replica continues with their mean"
        assert mean_only in caplog.text
    caplog.clear()
    log_other_replicas(manifest, rank_of(0, 2, 0, 1)[1])
    log_other_replicas(manifest, SimpleNamespace())
    assert not caplog.text


@pytest.mark.parametrize(
    ("key", "shape"), [("worker_error", (2, 7, 4)), ("worker_error", (0, 7, 5)), ("server_error", (2, 7, 5))]
)
def test_another_shape_is_reported(key, shape):
    fragment, optimizer = rank_of(0, 2, 0, 1)
    with refused(DamagedCheckpointError, f"'{key}'", code="damaged-manifest"):
        _state_ranges(fragment, optimizer, key, shape)

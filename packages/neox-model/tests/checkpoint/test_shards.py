import json
import os
import resource
import zlib

import pytest
import torch
from safetensors.torch import load_file

from neox_model.checkpoint import shards
from neox_model.checkpoint.contents import Layout, Manifest
from neox_model.checkpoint.errors import CheckpointError, DamagedCheckpointError
from neox_model.checkpoint.shard_file import ShardFile
from neox_model.checkpoint.shards import Part, ShardReader, records_of, write_shard
from support.refusals import refused


def part(name: str, values: torch.Tensor, *, start: int = 0, shape: tuple[int, ...] | None = None) -> Part:
    shape = tuple(values.shape) if shape is None else shape
    return Part(
        name=name,
        shape=shape,
        block=tuple((0, size) for size in shape),
        start=start,
        values=values.reshape(-1),
    )


def write(folder, parts):
    pieces, size = write_shard(folder / "shard.safetensors", parts)
    records, layout = records_of(pieces), Layout(data=1, model=1, pipe=1)
    files = {"shard.safetensors": size}
    manifest = Manifest(iteration=1, layout=layout, config={}, tensors=records, files=files)
    return records, ShardReader(folder, manifest)


def read(reader, name, shape, dtype):
    flat = torch.empty(torch.Size(shape).numel(), dtype=dtype)
    reader.fill(flat, name, (tuple((0, size) for size in shape), 0, flat.numel()))
    return flat.view(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_a_shard_gives_back_its_bits_here_and_through_safetensors(tmp_path, dtype):
    values = torch.arange(12).view(3, 4).to(dtype)
    scalar = torch.tensor(7).to(dtype)
    _, reader = write(tmp_path, [part("matrix", values), part("scalar", scalar), part("empty", values[:0])])
    assert torch.equal(read(reader, "matrix", (3, 4), dtype), values)
    assert torch.equal(read(reader, "scalar", (), dtype), scalar)
    assert torch.equal(load_file(tmp_path / "shard.safetensors")["matrix"], values)


def test_long_parts_are_split_into_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_PIECE_ELEMENTS", 5)
    values = torch.arange(12.0).view(3, 4)
    records, reader = write(tmp_path, [part("matrix", values)])
    assert [(piece.start, piece.stop) for piece in records["matrix"].pieces] == [(0, 5), (5, 10), (10, 12)]
    assert torch.equal(read(reader, "matrix", (3, 4), torch.float32), values)


def test_checksums_are_computed_once_for_many_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_PIECE_ELEMENTS", 5)
    values = torch.arange(60.0).view(3, 20)
    records, reader = write(tmp_path, [part("matrix", values)])
    record, whole = records["matrix"], (((0, 3), (0, 20)), 0, 60)
    assert [piece.crc32 for piece in record.pieces] == [
        zlib.crc32(values.view(-1)[piece.start : piece.stop].numpy().tobytes()) for piece in record.pieces
    ]
    reader.check([("matrix", whole, None), ("matrix", whole, None)])
    assert len(reader._intact) == 12
    monkeypatch.setattr(shards.zlib, "crc32", None)
    assert torch.equal(read(reader, "matrix", (3, 20), torch.float32), values)


def test_a_checksum_of_a_range_that_is_not_wanted_is_not_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_PIECE_ELEMENTS", 5)
    _, reader = write(tmp_path, [part("matrix", torch.arange(12.0).view(3, 4))])
    _alter_data(tmp_path / "shard.safetensors")
    block = ((0, 3), (0, 4))
    reader.check([("matrix", (block, 0, 10), None)])
    with refused(DamagedCheckpointError, "matrix:10-12", code="other-checksum"):
        reader.check([("matrix", (block, 0, 11), None)])


def test_a_missing_piece_is_named(tmp_path):
    _, reader = write(tmp_path, [part("matrix", torch.zeros(8), shape=(3, 4))])
    with refused(DamagedCheckpointError, "4 elements", code="missing-elements"):
        read(reader, "matrix", (3, 4), torch.float32)


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def _alter_data(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _alter_header(path):
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))


def _break_header(path):
    data = bytearray(path.read_bytes())
    data[8] = ord("x")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "shard.safetensors is damaged"),
        (_alter_data, "shard.safetensors is damaged"),
        (_alter_header, "12 elements of"),
        (_break_header, "shard.safetensors is damaged"),
        (lambda path: path.unlink(), "shard.safetensors"),
    ],
)
def test_damage_is_reported_with_the_file(tmp_path, damage, message):
    _, reader = write(tmp_path, [part("matrix", torch.arange(12.0).view(3, 4))])
    damage(tmp_path / "shard.safetensors")
    with refused(DamagedCheckpointError, message):
        read(reader, "matrix", (3, 4), torch.float32)


def test_a_shard_that_is_truncated_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_PIECE_ELEMENTS", 2**16)
    values = torch.arange(2.0**18)
    _, reader = write(tmp_path, [part("vector", values)])
    reader.check([("vector", (((0, len(values)),), 0, 10), None)])
    os.truncate(tmp_path / "shard.safetensors", 2**18)
    with refused(DamagedCheckpointError, "shard.safetensors", "262,144 bytes", "1,0"):
        read(reader, "vector", (len(values),), torch.float32)
    with refused(DamagedCheckpointError, "shard.safetensors", "262,144 bytes", "1,0"):
        reader.check([("vector", (((0, len(values)),), 0, len(values)), None)])


@pytest.mark.parametrize("size", [0, 7, 8, 20])
def test_a_file_without_a_whole_header_is_damaged(tmp_path, size):
    (tmp_path / "shard.safetensors").write_bytes((100).to_bytes(8, "little").ljust(size, b" ")[:size])
    with refused(DamagedCheckpointError, "shard.safetensors", "wrong length"):
        ShardFile(tmp_path / "shard.safetensors", size)


def test_a_damaged_length_of_the_header_does_not_read_a_large_file_as_json(tmp_path):
    path, size = tmp_path / "shard.safetensors", 100_000_100
    path.write_bytes((size - 8).to_bytes(8, "little"))
    os.truncate(path, size)  # A sparse file.
    with refused(DamagedCheckpointError, "shard.safetensors", "wrong length"):
        ShardFile(path, size)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [10**15], "data_offsets": [0, 4 * 10**15]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
        {"dtype": "F9", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": ["a"], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]},
        [],
    ],
)
def test_a_wrong_header_is_damage(tmp_path, entry):
    header = json.dumps({"name": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / "shard.safetensors").write_bytes(content)
    with refused(DamagedCheckpointError, "header", "for name"):
        ShardFile(tmp_path / "shard.safetensors", len(content)).tensor("name")


def test_a_shard_that_cannot_be_opened_because_too_many_files_are_open_is_not_damaged(tmp_path):
    """A damaged one would be downloaded again, or an earlier checkpoint be offered."""
    _, size = write_shard(tmp_path / "shard.safetensors", [part("matrix", torch.ones(3))])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with refused(CheckpointError, "shard.safetensors", f"{limit:,}", code="too-many-files") as caught:
            _ = [ShardFile(tmp_path / "shard.safetensors", size) for _ in range(limit)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not isinstance(caught.value, DamagedCheckpointError)

"""What a checkpoint holds, as a typed record: the manifest beside the shards.

A tensor is named and shaped as in the whole, unsharded model. Its pieces say who wrote what: a piece is a
row-major range `[start, stop)` inside a block, and a block is one interval per dimension of the whole
tensor. Tensor parallelism makes blocks, ZeRO makes ranges; neither leaves a trace in the names.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from neox_model.checkpoint.errors import CheckpointError, DamagedCheckpointError

__all__ = ["FORMAT", "MANIFEST", "Block", "Layout", "Manifest", "Piece", "TensorRecord", "block_numel"]

FORMAT = "neox-checkpoint-1"
MANIFEST = "manifest.json"

Block = tuple[tuple[int, int], ...]


def block_numel(block: Block) -> int:
    """Number of elements in a block; 1 for a tensor without dimensions."""
    return prod(stop - start for start, stop in block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One stored part of a tensor: where it lies in the tensor and in which file its bytes are."""

    block: Block
    start: int
    stop: int
    file: str
    key: str
    crc32: int

    @property
    def numel(self) -> int:
        """Number of stored elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One logical tensor: its whole shape, its dtype as safetensors names it, and its pieces."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the pieces hold exactly as many elements as the tensor has."""
        return sum(piece.numel for piece in self.pieces) == prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes of the parallel groups that wrote the checkpoint."""

    data: int
    model: int
    pipe: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The JSON file that makes a folder of shards a checkpoint.

    Args:
        iteration: finished optimizer updates.
        layout: the writing run's parallel sizes.
        config: flat parameter name to value, of the writing run.
        tensors: logical name to record; optimizer states are `NAME/exp_avg` beside the weight `NAME`.
        optimizer: class name of the optimizer, or None when its states were left out.
        optimizer_scalars: weight name to its states that are single numbers, such as `step`.
        engine: the engine's counters and the loss scaler's numbers.
        schedule: state of the learning-rate schedule.
        training: state of the training loop.
        files: shard name to size in bytes.
    """

    iteration: int
    layout: Layout
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorRecord]
    optimizer: str | None = None
    optimizer_scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """Text of the manifest file, with a checksum over its own contents."""
        contents = _encode(asdict(self))
        return f'{{"format": "{FORMAT}", "crc32": {zlib.crc32(contents.encode())}, "contents": {contents}}}\n'

    @property
    def weight_names(self) -> set[str]:
        """Logical names of the weights; every other tensor has a slash in its name."""
        return {name for name in self.tensors if "/" not in name}

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Read and verify the manifest of a checkpoint folder.

        Raises:
            CheckpointError: the file is absent, unreadable, of another format or damaged.
        """
        path = folder / MANIFEST
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise CheckpointError(
                    f"{path} has the format {document['format']!r}, this version reads {FORMAT!r}; "
                    "load it with the version that wrote it"
                )
            contents = document["contents"]
            if zlib.crc32(_encode(contents).encode()) != document["crc32"]:
                raise DamagedCheckpointError(f"{path} is damaged: its checksum does not match its contents")
        except OSError as error:
            raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpointError(f"{path} is damaged: {error!r}") from error
        return _decode(contents)


def _encode(contents: Mapping[str, Any]) -> str:
    return json.dumps(contents, separators=(",", ":"), sort_keys=True)


def _decode(contents: dict[str, Any]) -> Manifest:
    tensors = {
        name: TensorRecord(
            shape=tuple(record["shape"]),
            dtype=record["dtype"],
            pieces=tuple(_decode_piece(piece) for piece in record["pieces"]),
        )
        for name, record in contents["tensors"].items()
    }
    return Manifest(**{**contents, "layout": Layout(**contents["layout"]), "tensors": tensors})


def _decode_piece(piece: dict[str, Any]) -> Piece:
    block = tuple((start, stop) for start, stop in piece["block"])
    return Piece(**{**piece, "block": block})

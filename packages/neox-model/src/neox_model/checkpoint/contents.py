"""The manifest of a checkpoint: a typed record of its contents.

A tensor has the name and shape that it has in the whole, unsharded model. A piece is a row-major range
`[start, stop)` inside a block, and a block is one interval per dimension of the whole tensor. Tensor
parallelism produces blocks, ZeRO produces ranges; names depend on neither.
"""

import hashlib
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from math import inf, prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from neox_config import finite_json
from neox_config.facts.checkpoints import MANIFEST
from neox_model.checkpoint.blocks import Range, block_numel, overlapping
from neox_model.checkpoint.errors import CheckpointError, DamagedCheckpointError, quoted
from neox_model.checkpoint.names import average_name, is_weight, model_state_name
from neox_model.checkpoint.stored_types import STORED_TYPES

__all__ = [
    "FORMAT",
    "Layout",
    "Manifest",
    "Piece",
    "TensorRecord",
    "are_ranges",
    "first_problem",
    "is_count",
    "manifest_sha256",
]

FORMAT = "neox-checkpoint-1"

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Size = Annotated[int, Field(ge=1, lt=2**63)]
_Number = Annotated[int, Field(ge=-(2**63), lt=2**63)] | float
_Checksum = Annotated[int, Field(ge=0, lt=2**32)]
# Longest name of a file on common file systems.
_NAME_BYTES = 255
_MOST_DIMENSIONS = 64
# The engine's counters, and the loss scale's. `cur_scale`, the scale itself, may have a fraction.
_ENGINE_INTEGERS = ("global_steps", "global_samples", "cur_iter", "last_overflow_iter", "cur_hysteresis")
# A field that this version does not know would be lost, so it is an error.
_EXACT = ConfigDict(extra="forbid", allow_inf_nan=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One stored part of a tensor: its place in the tensor and the file that contains its bytes."""

    __pydantic_config__ = _EXACT

    block: tuple[tuple[_Count, _Count], ...]
    start: _Count
    stop: _Count
    file: str
    key: str
    crc32: _Checksum

    @property
    def numel(self) -> int:
        """Return the number of stored elements."""
        return self.stop - self.start

    @property
    def range(self) -> Range:
        """Return its place in the tensor."""
        return self.block, self.start, self.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One logical tensor: its whole shape, its dtype as safetensors names it, and its pieces."""

    __pydantic_config__ = _EXACT

    shape: tuple[_Count, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def is_complete(self) -> bool:
        """Return True if the pieces contain exactly as many elements as the tensor."""
        return sum(piece.numel for piece in self.pieces) == prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return the size of the whole tensor in bytes."""
        return prod(self.shape) * STORED_TYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes of the parallel groups that wrote the checkpoint."""

    __pydantic_config__ = _EXACT

    data: _Size
    model: _Size
    pipe: _Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The JSON file that describes a checkpoint.

    Args:
        iteration: finished optimizer updates.
        layout: the writing run's parallel sizes.
        config: the writing run's parameters by name, the values in effect, its batch size and digests of the
            samples that it read.
        tensors: logical name to record; optimizer states of the weight `NAME` are `NAME/exp_avg` and so on.
        optimizer: class name of the optimizer; None if its states were not saved.
        optimizer_scalars: weight name to its single-number states, such as `step`.
        engine: the engine's counters and the loss scaler's state.
        schedule: state of the learning-rate schedule.
        training: state of the training loop.
        files: shard name to size in bytes.
        packages: package name to version, of the program that wrote it; empty in older checkpoints.
    """

    __pydantic_config__ = _EXACT

    iteration: _Count
    layout: Layout
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorRecord]
    optimizer: str | None = None
    optimizer_scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, _Count] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)

    def with_averages(self) -> "Manifest":
        """Return the description of a checkpoint in which the averages of the weights are the weights.

        Raises:
            CheckpointError: a weight has no average.
        """
        names = {name: model_state_name(average_name(name)) for name in self.weight_names}
        if not set(names.values()) <= self.tensors.keys():
            raise CheckpointError(
                "the checkpoint contains no averages of its weights, because ema-decay was not set in its "
                "training; use the weights themselves (load-ema: false, or to-hf without --ema)"
            )
        averages = {name: self.tensors[average] for name, average in names.items()}
        return replace(self, tensors={**self.tensors, **averages})

    def to_json(self) -> str:
        """Return the text of the manifest file, which includes a checksum of its contents."""
        contents = finite_json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)
        return f'{{"format": "{FORMAT}", "crc32": {zlib.crc32(contents.encode())}, "contents": {contents}}}\n'

    @property
    def weight_names(self) -> set[str]:
        """Return the logical names of the weights; all other tensors have a slash in their name."""
        return set(filter(is_weight, self.tensors))

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Read and verify the manifest of a checkpoint folder.

        Raises:
            CheckpointError: the file is absent, unreadable, of another format or damaged.
        """
        path = folder / MANIFEST
        try:
            manifest = _parse(path.read_bytes(), path)
        except OSError as error:
            raise DamagedCheckpointError(f"cannot read {path}: {error.strerror}") from error
        problem = next(_problems(manifest), None)
        if problem is not None:
            raise DamagedCheckpointError(f"{path} is damaged: {problem}")
        return manifest


@dataclass(frozen=True, slots=True)
class _Scalar:
    __pydantic_config__ = _EXACT

    value: _Number | None
    dtype: str | None


@dataclass(frozen=True, slots=True)
class _ForwardPass:
    __pydantic_config__ = _EXACT

    samples: _Number
    loss: _Number
    batch: str
    precision: str
    # Checkpoints of before have none.
    micro_batch: _Number = 0


@dataclass(frozen=True, slots=True)
class _Training:
    iteration: _Count = 0
    skipped_iterations: _Count = 0
    tokens: _Count = 0
    samples: _Count = 0
    validation_samples: _Count = 0
    due_validation: _Count | None = None
    batch_sizes: Sequence[tuple[_Count, _Size]] = ()
    recent_losses: Sequence[_Number] = ()
    forward_pass: _ForwardPass | None = None


@dataclass(frozen=True, slots=True)
class _States:
    """The plain values in a manifest, as far as they must have a form."""

    training: _Training = _Training()
    engine: Mapping[str, _Number | None] = field(default_factory=dict)
    optimizer_scalars: Mapping[str, Mapping[str, _Scalar]] = field(default_factory=dict)


@cache
def _schemas() -> tuple[TypeAdapter[Manifest], TypeAdapter[_States]]:
    return TypeAdapter(Manifest), TypeAdapter(_States)


def _parse(content: bytes, path: Path) -> Manifest:
    """Return the manifest in the text of a file, with the right types.

    Raises:
        CheckpointError: the text is of another format, or damaged.
    """
    try:
        document = json.loads(content)
        if document["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has the format {quoted(repr(document['format']))}, but this version reads only "
                f"{FORMAT!r}; load it with the version that wrote it"
            )
        text = _encode(document["contents"])
        if zlib.crc32(text.encode()) != document["crc32"]:
            raise DamagedCheckpointError(f"{path} is damaged: its checksum does not match its contents")
        if finite_json.FLAG in document["contents"]:
            text = _encode(finite_json.restored(document["contents"]))
        whole, states = _schemas()
        manifest = whole.validate_json(text, strict=True)
        states.validate_json(text, strict=True)
        return manifest
    except ValidationError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {first_problem(error)}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{path} is damaged: it is not the text of a manifest; restore it from a copy"
        ) from error


def first_problem(error: ValidationError, *place: str) -> str:
    """Return the first problem that pydantic found, after its place inside `place`."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{quoted(' / '.join(map(str, (*place, *first['loc']))))}: {first['msg']}"


def manifest_sha256(folder: Path) -> str | None:
    """Return the SHA-256 of a checkpoint's manifest; None if there is none."""
    manifest = folder / MANIFEST
    return hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else None


def _encode(contents: Mapping[str, Any]) -> str:
    # Manifests of earlier versions may contain NaN, which is part of the text with the checksum.
    return json.dumps(contents, separators=(",", ":"), sort_keys=True)


def _problems(manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong with the values of a manifest whose types are right; later ones rely on earlier."""
    for name in manifest.files:
        is_plain = name == Path(name).name and name not in ("", ".", "..") and name.isprintable()
        if not is_plain or len(name.encode()) > _NAME_BYTES:
            yield f"files contains {quoted(name)!r}, which is not a plain file name"
    stored: dict[str, int] = defaultdict(int)
    for name, record in manifest.tensors.items():
        yield from (f"{quoted(name)}: {problem}" for problem in _problems_of_tensor(record, manifest.files))
        for piece in record.pieces:
            stored[piece.file] += piece.numel * STORED_TYPES[record.dtype].itemsize
    for name, size in stored.items():
        if size > manifest.files[name]:
            yield f"{quoted(name)} has {manifest.files[name]:,} bytes, but its tensors have {size:,}"
    yield from _problems_of_states(manifest)


def _problems_of_states(manifest: Manifest) -> Iterator[str]:
    if STORED_TYPES["F32"].largest < abs(manifest.engine.get("cur_scale") or 0) < inf:
        yield "engine / cur_scale is too large"
    for name in _ENGINE_INTEGERS:
        value = manifest.engine.get(name) or 0
        if not isinstance(value, int) or not -(2**63) <= value < 2**63:
            yield f"engine / {name} is not an integer of 64 bits"
    if not are_ranges(manifest.training.get("left_out", [])):
        yield "training / left_out is not an ordered list of ranges [first, stop] with first < stop"
    for states in manifest.optimizer_scalars.values():
        for name, state in states.items():
            value, dtype = state["value"], state["dtype"]
            is_stored = dtype in STORED_TYPES and value is not None and STORED_TYPES[dtype].holds(value)
            if dtype is not None and not is_stored:
                yield f"optimizer_scalars / {quoted(name)} does not fit its dtype"


def _problems_of_tensor(record: TensorRecord, files: Mapping[str, int]) -> Iterator[str]:
    if record.dtype not in STORED_TYPES:
        yield f"its dtype {quoted(record.dtype)!r} is unknown"
    if len(record.shape) > _MOST_DIMENSIONS or prod(record.shape) >= 2**63:
        yield "its shape is too large"
    for piece in record.pieces:
        if piece.file not in files:
            yield f"its file {quoted(piece.file)!r} is not one of the checkpoint's files"
        if len(piece.block) != len(record.shape) or any(
            not low <= high <= size for (low, high), size in zip(piece.block, record.shape, strict=True)
        ):
            yield "a block lies outside its shape"
        elif not piece.start <= piece.stop <= block_numel(piece.block):
            yield "a range lies outside its block"
    stored = sum(piece.numel for piece in record.pieces)
    if stored > prod(record.shape) or overlapping(piece.range for piece in record.pieces):
        yield "its pieces overlap"


def is_count(value: Any) -> bool:
    """Return whether a value is a number of iterations, updates, samples or tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def are_ranges(value: Any) -> bool:
    """Return whether a value read from JSON is an ordered list of ranges [first, stop], none empty."""
    if not isinstance(value, list):
        return False
    is_range = all(
        isinstance(one, list) and len(one) == 2 and all(map(is_count, one)) and one[0] < one[1]
        for one in value
    )
    return is_range and value == sorted(value)

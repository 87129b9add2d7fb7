"""Merge adapters into the weights of their base: a checkpoint of a whole model, in one process.

The weights are read, changed and written layer by layer, so that memory holds one layer at a time. The
result has no optimizer states; it is a base for other adapters, and loads wherever the base loads.
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from neox_config.facts.adapters import adapter_scale
from neox_config.facts.checkpoints import MANIFEST, checkpoint_name
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint.base import BASE
from neox_model.checkpoint.blocks import Block
from neox_model.checkpoint.contents import Layout, Manifest, TensorRecord
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.shards import Part, ShardReader, WrittenPiece, write_durably, write_shard
from neox_model.versions import package_versions

__all__ = ["merge_adapters"]

logger = logging.getLogger(__name__)

_SIDE_A, _SIDE_B = ".adapter.a", ".adapter.b"


def merge_adapters(adapters: Path, output: Path, *, base: Path | None = None) -> Path:
    """Write the weights of a base with adapters merged into them.

    Args:
        adapters: folder of one checkpoint of adapters.
        output: folder of checkpoints to write to; the checkpoint has the iteration of the adapters.
        base: folder of the checkpoints of the base; None: the one that the adapters name.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: a checkpoint is damaged, it is not one of adapters, or the base is another one.
        OSError: the output cannot be written.
    """
    manifest = Manifest.read(adapters)
    if BASE not in manifest.config:
        raise CheckpointError(f"{adapters} is not a checkpoint of adapters; there is nothing to merge")
    folder = _find_base(manifest, base)
    whole = Manifest.read(folder)
    final = output / checkpoint_name(manifest.iteration)
    if final.exists():
        raise CheckpointError(f"{final} exists already; choose another folder")
    temporary = folders.unfinished(final)
    folders.begin(temporary)
    try:
        merged, files = _write(_Merge(adapters, manifest, folder, whole), temporary)
        written = replace(
            whole,
            iteration=manifest.iteration,
            layout=Layout(data=1, model=1, pipe=1),
            tensors=merged,
            optimizer=None,
            optimizer_scalars={},
            files=files,
            packages=package_versions(),
        )
        write_durably(temporary / MANIFEST, written.to_json())
        folders.publish(temporary, final)
    except BaseException:
        folders.abandon(temporary)
        raise
    return final


def _find_base(manifest: Manifest, given: Path | None) -> Path:
    """Return the checkpoint of the base whose manifest has the recorded SHA-256."""
    recorded = manifest.config[BASE]
    folder = Path(recorded["folder"]) if given is None else given
    found = folder / checkpoint_name(recorded["iteration"])
    if not (found / MANIFEST).is_file():
        raise CheckpointError(
            f"the base of the adapters, {found}, does not exist here; give its folder with --base"
        )
    digest = hashlib.sha256((found / MANIFEST).read_bytes()).hexdigest()
    if digest != recorded["manifest_sha256"]:
        raise CheckpointError(
            f"{found} is not the base of the adapters: its manifest has the SHA-256 {digest[:16]}, not "
            f"{recorded['manifest_sha256'][:16]}; give the folder of the right one with --base"
        )
    return found


class _Merge:
    """Reads the weights of a base, with the products of adapters added."""

    def __init__(self, adapters: Path, manifest: Manifest, base: Path, whole: Manifest) -> None:
        self.names = sorted(whole.weight_names)
        self._whole, self._manifest = whole, manifest
        self._of_base = ShardReader(base, whole.files)
        self._of_adapters = ShardReader(adapters, manifest.files)
        self._scale = adapter_scale(rank=manifest.config["lora_rank"], alpha=manifest.config["lora_alpha"])
        adapted = {name.removesuffix(_SIDE_A) for name in manifest.weight_names if name.endswith(_SIDE_A)}
        unknown = sorted(name for name in adapted if f"{name}.weight" not in whole.tensors)
        if unknown or 2 * len(adapted) != len(manifest.weight_names):
            raise CheckpointError(
                f"{adapters} has adapters of matrices that {base} does not have: {', '.join(unknown)}"
            )
        self.adapted = adapted

    def weight(self, name: str) -> Tensor:
        """Return a weight of the merged model, whole."""
        weight = _read(self._of_base, name, self._whole.tensors[name])
        matrix = name.removesuffix(".weight")
        if matrix not in self.adapted or matrix == name:
            return weight
        a, b = (
            _read(self._of_adapters, matrix + side, self._manifest.tensors[matrix + side])
            for side in (_SIDE_A, _SIDE_B)
        )
        return weight + (self._scale * (b.double() @ a.double())).to(weight.dtype)


def _read(reader: ShardReader, name: str, record: TensorRecord) -> Tensor:
    wanted = (_block(record.shape), 0, prod(record.shape))
    reader.check_sums([(record, wanted)])
    # Checkpoints contain float32 weights.
    target = torch.empty(prod(record.shape))
    reader.check(name, record, wanted, target.dtype)
    reader.fill(target, name, record, wanted)
    return target.view(record.shape)


def _write(merge: _Merge, folder: Path) -> tuple[dict[str, TensorRecord], dict[str, int]]:
    """Write one shard per layer; return the records of the tensors, and the sizes of the files."""
    pieces: dict[str, list[WrittenPiece]] = defaultdict(list)
    files: dict[str, int] = {}
    for number, names in enumerate(_by_layer(merge.names)):
        path = folder / f"shard-{number:05d}.safetensors"
        written, files[path.name] = write_shard(path, [_part(name, merge.weight(name)) for name in names])
        for piece in written:
            pieces[piece.name].append(piece)
    records = {
        name: TensorRecord(
            shape=parts[0].shape, dtype=parts[0].dtype, pieces=tuple(part.piece for part in parts)
        )
        for name, parts in pieces.items()
    }
    if records.keys() != set(merge.names) or not all(record.is_complete for record in records.values()):
        raise CheckpointError(f"{folder} does not contain all elements of the base's tensors")
    logger.info("merged %d adapters into %d tensors", len(merge.adapted), len(records))
    return records, files


def _by_layer(names: list[str]) -> Iterator[list[str]]:
    for _, group in groupby(names, key=lambda name: ".".join(name.split(".")[:2])):
        yield list(group)


def _part(name: str, weight: Tensor) -> Part:
    shape = tuple(weight.shape)
    return Part(name=name, shape=shape, block=_block(shape), start=0, values=weight.reshape(-1))


def _block(shape: tuple[int, ...]) -> Block:
    return tuple((0, length) for length in shape)

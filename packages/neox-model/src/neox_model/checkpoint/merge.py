"""Merge adapters into the weights of their base: a checkpoint of a whole model, in one process.

The weights are read, changed and written layer by layer, so that memory holds one layer at a time. The
result has no optimizer states; it is a base for other adapters, and loads wherever the base loads.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from neox_config.counted import counted
from neox_config.facts.checkpoints import MANIFEST, checkpoint_name
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint.adapters import Adapters, whole_tensor
from neox_model.checkpoint.base import recorded_base
from neox_model.checkpoint.blocks import Block
from neox_model.checkpoint.contents import Layout, Manifest, TensorRecord
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.shards import Part, ShardReader, WrittenPiece, write_durably, write_shard
from neox_model.versions import package_versions

__all__ = ["merge_adapters"]

logger = logging.getLogger(__name__)


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
    found = Adapters(adapters)
    manifest = found.manifest
    folder = recorded_base(found.base, base)
    whole = Manifest.read(folder)
    final = output / checkpoint_name(manifest.iteration)
    if final.exists():
        raise CheckpointError(f"{final} exists already; choose another folder")
    temporary = folders.unfinished(final)
    folders.begin(temporary)
    try:
        merged, files = _write(_Merge(found, folder, whole), temporary)
        written = replace(
            whole,
            iteration=manifest.iteration,
            layout=Layout(data=1, model=1, pipe=1),
            config={**whole.config, **_of_adapters(manifest)},
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


def _of_adapters(manifest: Manifest) -> dict[str, Any]:
    """Return the settings of the adapters' training that the merged model keeps.

    The tokenizer is that of the base, but the adapters may have been trained with a copy of its files, and
    the chat template is next to these.
    """
    config = manifest.config
    kept = {"stop_tokens": config["stop_tokens"]} if "stop_tokens" in config else {}
    files = {name: config[name] for name in ("vocab_file", "merge_file") if config.get(name)}
    if all(map(os.path.exists, files.values())):
        kept |= {name: os.path.abspath(path) for name, path in files.items()}
    return kept


class _Merge:
    """Reads the weights of a base, with the products of adapters added."""

    def __init__(self, adapters: Adapters, base: Path, whole: Manifest) -> None:
        self.names = sorted(whole.weight_names)
        self.adapters = adapters
        self._whole = whole
        self._reader = ShardReader(base, whole.files)
        adapters.check_base(base, {name: whole.tensors[name].shape for name in self.names})

    def weight(self, name: str) -> Tensor:
        """Return a weight of the merged model, whole."""
        weight = whole_tensor(self._reader, self._whole, name)
        matrix = name.removesuffix(".weight")
        if matrix not in self.adapters.matrices or matrix == name:
            return weight
        return weight + self.adapters.product(matrix).to(weight.dtype)


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
    adapters = counted(len(merge.adapters.matrices), "adapter")
    logger.info("merged %s into %s", adapters, counted(len(records), "tensor"))
    return records, files


def _by_layer(names: list[str]) -> Iterator[list[str]]:
    for _, group in groupby(names, key=lambda name: ".".join(name.split(".")[:2])):
        yield list(group)


def _part(name: str, weight: Tensor) -> Part:
    shape = tuple(weight.shape)
    return Part(name=name, shape=shape, block=_block(shape), start=0, values=weight.reshape(-1))


def _block(shape: tuple[int, ...]) -> Block:
    return tuple((0, length) for length in shape)

"""Write a checkpoint again as one process would have: whole tensors, in few files.

Everything in the manifest stays the same except where the tensors are, and the values are those of the source
to the last bit. Memory holds one part of a tensor at a time.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from neox_config.counted import counted
from neox_config.facts.checkpoints import MANIFEST, checkpoint_name
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.dtypes import DTYPES
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.names import in_model_order
from neox_model.checkpoint.shards import ShardReader, write_durably
from neox_model.checkpoint.stream import StreamedTensor, write_streamed_shards

__all__ = ["convert_layout"]

# As large as the largest pieces, each of which is read whole.
_ELEMENTS = 2**24

logger = logging.getLogger(__name__)


def convert_layout(folder: Path, output: Path) -> Path:
    """Write a checkpoint again with whole tensors, whatever layout wrote it.

    Args:
        folder: the checkpoint.
        output: folder of checkpoints to write to; the checkpoint has the iteration of the source.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or the output has one of this iteration.
        OSError: the output cannot be written.
    """
    manifest = Manifest.read(folder)
    final = output / checkpoint_name(manifest.iteration)
    if final.exists():
        raise CheckpointError(f"{final} exists already; choose another folder")
    tensors = [
        StreamedTensor(name, manifest.tensors[name].shape, DTYPES[manifest.tensors[name].dtype])
        for name in in_model_order(manifest.tensors)
    ]
    reader = ShardReader(folder, manifest.files)
    temporary = folders.unfinished(final)
    folders.begin(temporary)
    try:
        records, files = write_streamed_shards(temporary, tensors, partial(_values, reader, manifest))
        written = replace(manifest, tensors=records, files=files)
        write_durably(temporary / MANIFEST, written.to_json())
        folders.publish(temporary, final)
    except BaseException:
        folders.abandon(temporary)
        raise
    written_tensors, there = counted(len(records), "tensor"), counted(len(manifest.files), "file")
    logger.info("wrote %s of %s to %s", written_tensors, there, f"{len(files):,}")
    return final


def _values(reader: ShardReader, manifest: Manifest, name: str) -> Iterator[Tensor]:
    """Yield the values of a tensor in row-major order, flat."""
    record = manifest.tensors[name]
    whole, numel = tuple((0, length) for length in record.shape), prod(record.shape)
    for start in range(0, numel, _ELEMENTS):
        stop = min(start + _ELEMENTS, numel)
        values = torch.empty(stop - start, dtype=DTYPES[record.dtype])
        reader.fill(values, name, record, (whole, start, stop))
        yield values

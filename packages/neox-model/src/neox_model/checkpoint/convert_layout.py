"""Write a checkpoint again as one process would have: whole tensors, in few files.

Everything in the manifest stays the same except where the tensors are, and the values are those of the source
to the last bit. Memory holds one part of a tensor at a time.
"""

import logging
from collections.abc import Iterator
from math import prod
from pathlib import Path

from torch import Tensor

from neox_config.pluralize import pluralize
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.dtypes import DTYPES
from neox_model.checkpoint.names import in_model_order
from neox_model.checkpoint.shards import ShardReader
from neox_model.checkpoint.stream import StreamedTensor, write_whole_tensors

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
    tensors = [
        StreamedTensor(name, manifest.tensors[name].shape, DTYPES[manifest.tensors[name].dtype])
        for name in in_model_order(manifest.tensors)
    ]
    reader = ShardReader(folder, manifest)

    def values(name: str) -> Iterator[Tensor]:
        numel = prod(manifest.tensors[name].shape)
        for start in range(0, numel, _ELEMENTS):
            yield reader.values(name, start, min(start + _ELEMENTS, numel))

    final, written = write_whole_tensors(manifest, tensors, values, output)
    written_tensors, there = pluralize(len(tensors), "tensor"), pluralize(len(manifest.files), "file")
    logger.info("wrote %s of %s to %s", written_tensors, there, f"{len(written.files):,}")
    return final

"""Merge adapters into the weights of their base: a checkpoint of a whole model, in one process.

The weights are read, changed and written one after another, so that memory holds one at a time. The
result has no optimizer states; it is a base for other adapters, and loads wherever the base loads.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox_config.counted import counted
from neox_model.checkpoint.adapters import Adapters, whole_tensor
from neox_model.checkpoint.base import recorded_base
from neox_model.checkpoint.contents import Layout, Manifest
from neox_model.checkpoint.shards import ShardReader
from neox_model.checkpoint.stream import StreamedTensor, write_whole_tensors
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
    folder = recorded_base(found.base, base)
    whole = Manifest.read(folder)
    reader = ShardReader(folder, whole)
    names = sorted(whole.weight_names)
    found.check_base(folder, {name: whole.tensors[name].shape for name in names})

    def values(name: str) -> Iterator[Tensor]:
        weight = whole_tensor(reader, whole, name)
        matrix = name.removesuffix(".weight")
        if matrix in found.matrices and matrix != name:
            weight += found.product(matrix).to(weight.dtype)
        yield weight

    merged = replace(
        whole,
        iteration=found.manifest.iteration,
        layout=Layout(data=1, model=1, pipe=1),
        config={**whole.config, **_of_adapters(found.manifest)},
        optimizer=None,
        optimizer_scalars={},
        packages=package_versions(),
    )
    tensors = [StreamedTensor(name, whole.tensors[name].shape, torch.float32) for name in names]
    final, _ = write_whole_tensors(merged, tensors, values, output)
    adapters_there, tensors_there = counted(len(found.matrices), "adapter"), counted(len(names), "tensor")
    logger.info("merged %s into %s", adapters_there, tensors_there)
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

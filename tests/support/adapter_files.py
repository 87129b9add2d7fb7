"""Checkpoints of random adapters, without a run."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from neox_config.facts.adapters import ADAPTED
from neox_config.facts.checkpoints import MANIFEST, checkpoint_name
from neox_model.checkpoint.base import BASE
from neox_model.checkpoint.contents import Manifest, TensorRecord
from neox_model.checkpoint.directory import point_latest
from neox_model.checkpoint.shards import Part, write_shard

__all__ = ["write_adapters"]


def write_adapters(
    base: Path,
    folder: Path,
    *,
    rank: int = 3,
    alpha: float = 7.0,
    matrices: Sequence[str] = ADAPTED,
    seed: int = 0,
    size: float = 0.1,
) -> Path:
    """Write a checkpoint of iteration 4 with random A and B, and return it.

    Args:
        base: one checkpoint of the base.
        folder: folder of checkpoints to write to.
        rank: rank of the adapters.
        alpha: their scale.
        matrices: names of adapted matrices; what the model does not have is left out.
        seed: of the random values.
        size: standard deviation of the values.
    """
    whole = Manifest.read(base)
    random = torch.Generator().manual_seed(seed)
    parts = []
    for name, record in whole.tensors.items():
        matrix = name.removesuffix(".weight")
        if not name.startswith("layers.") or matrix == name or matrix.rpartition(".")[2] not in matrices:
            continue
        outputs, inputs = record.shape
        for side, shape in (("a", (rank, inputs)), ("b", (outputs, rank))):
            values = size * torch.randn(shape, generator=random)
            block = tuple((0, length) for length in shape)
            name_of = f"{matrix}.adapter.{side}"
            parts.append(Part(name=name_of, shape=shape, block=block, start=0, values=values.view(-1)))
    final = folder / checkpoint_name(4)
    final.mkdir(parents=True)
    shard = final / "shard-00000.safetensors"
    written, size_of_file = write_shard(shard, parts)
    records = {
        piece.name: TensorRecord(shape=piece.shape, dtype=piece.dtype, pieces=(piece.piece,))
        for piece in written
    }
    recorded = {
        "folder": str(base.parent),
        "iteration": whole.iteration,
        "manifest_sha256": hashlib.sha256((base / MANIFEST).read_bytes()).hexdigest(),
    }
    adapted = {
        "lora_rank": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.1,
        "lora_target_modules": list(matrices),
        BASE: recorded,
    }
    manifest = replace(
        whole,
        iteration=4,
        tensors=records,
        files={shard.name: size_of_file},
        config=whole.config | adapted,
        optimizer=None,
        optimizer_scalars={},
    )
    (final / MANIFEST).write_text(manifest.to_json())
    point_latest(folder, final.name)
    return final

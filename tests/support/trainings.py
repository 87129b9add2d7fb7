"""Several trainings of the training program in one world, and what their checkpoints contain."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox_config.facts.checkpoints import LATEST, checkpoint_name
from support.settings import SMALL_TRAINING, resolved_from

__all__ = ["evaluate_parts_here", "tensors_of", "train_all"]


def train_all(folder: str, corpus: str, trainings: dict[str, dict[str, Any]]) -> None:
    """Run the runs in turn; `restart_at` is the iteration that `latest` names before."""
    from torch import distributed

    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run

    for name, settings in trainings.items():
        if "restart_at" in settings:
            settings = dict(settings)
            (Path(settings["load"]) / LATEST).write_text(checkpoint_name(settings.pop("restart_at")))
            distributed.barrier()
        given = SMALL_TRAINING | {"data_path": corpus, "save": f"{folder}/{name}", "save_interval": 2}
        resolved = resolved_from(given | settings, devices=int(os.environ["WORLD_SIZE"]))
        layout = resolved.run.layout
        groups = create_groups(layout.tensor, layout.stages, layout.experts)
        open_run.train_in(groups, resolved)
        distributed.barrier()


def tensors_of(folder: Path, iteration: int) -> dict[str, Tensor]:
    """Return the whole tensors of a checkpoint, by name."""
    from neox_model.checkpoint.contents import Manifest
    from neox_model.checkpoint.shards import ShardReader

    checkpoint = folder / checkpoint_name(iteration)
    manifest = Manifest.read(checkpoint)
    reader, found = ShardReader(checkpoint, manifest), {}
    for name, record in manifest.tensors.items():
        if not name.startswith("rng"):
            whole = torch.empty(record.shape, dtype=torch.float64)
            wanted = tuple((0, length) for length in record.shape), 0, whole.numel()
            reader.fill(whole.view(-1), name, wanted)
            found[name] = whole
    return found


def evaluate_parts_here(settings: dict[str, Any]) -> str:
    """Return what neox-launch evaluate prints, in process groups that exist already."""
    from neox_model.evaluate.run import evaluate_in
    from neox_model.parallel.groups import SINGLE_PROCESS

    found = evaluate_in(SINGLE_PROCESS, resolved_from(settings))
    assert isinstance(found, str)
    return found

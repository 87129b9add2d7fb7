"""Write a converted model as a checkpoint of ours."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from neox_config import Resolved
from neox_config.facts.checkpoints import LATEST, MANIFEST, checkpoint_name
from neox_config.pluralize import pluralize
from neox_config.spec.resume import recorded_values
from neox_data.amount_progress import tracked
from neox_model.checkpoint.contents import Layout, Manifest
from neox_model.checkpoint.shards import write_durably
from neox_model.checkpoint.stream import StreamedTensor, write_streamed_shards
from neox_model.versions import package_versions

__all__ = ["recorded_config", "write_checkpoint"]

logger = logging.getLogger(__name__)


def recorded_config(resolved: Resolved, tokenizer: Any) -> dict[str, Any]:
    """Return what a manifest records about a configuration, as it is read again."""
    found: dict[str, Any] = json.loads(
        json.dumps(
            recorded_values(resolved, fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size),
            allow_nan=False,
        )
    )
    return found


def write_checkpoint(
    output: Path,
    tensors: Sequence[StreamedTensor],
    values: Callable[[str], Iterable[Tensor]],
    config: dict[str, Any],
    *,
    iteration: int = 0,
    progress: Mapping[str, Any] | None = None,
) -> Path:
    """Write `global_stepN` and `latest`, and return the checkpoint's folder.

    Args:
        output: the folder of both.
        tensors: what is written, in this order.
        values: name -> the tensor's values in row-major order, in chunks of any shape, of its dtype.
        config: what the manifest records about the configuration.
        iteration: finished iterations.
        progress: entries of the manifest that describe a run.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    folder = output / checkpoint_name(iteration)
    folder.mkdir()
    logger.info("writing %s", pluralize(len(tensors), "tensor"))
    with tracked(map(values, (tensor.name for tensor in tensors)), len(tensors), "tensors written") as each:
        records, sizes = write_streamed_shards(folder, tensors, lambda name: next(each))
        assert next(each, None) is None, "more tensors than announced"
    manifest = Manifest(
        iteration=iteration,
        layout=Layout(data=1, model=1, pipe=1),
        config=config,
        tensors=records,
        **(progress or {}),
        files=sizes,
        packages=package_versions(),
    )
    write_durably(folder / MANIFEST, manifest.to_json())
    write_durably(output / LATEST, folder.name + "\n")
    return folder

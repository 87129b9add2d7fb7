"""Whether a run may continue from a checkpoint, and what it must say when it does."""

import logging
from collections.abc import Mapping
from typing import Any

from neox_launcher.config.problems import in_words
from neox_launcher.config.resume import (
    LEARNING_RATE,
    SAMPLES_PER_ITERATION,
    Change,
    Changes,
    compare,
)
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.errors import CheckpointError

__all__ = [
    "SAMPLES_DIGEST",
    "changes_since",
    "log_model_changes",
    "log_training_changes",
    "refuse_model_changes",
    "refuse_state_changes",
    "training_state",
]

logger = logging.getLogger(__name__)

# Recorded beside the parameters: digests of the samples that were read, by part.
SAMPLES_DIGEST = "samples_digest"
_PARTS = {"train": "training samples", "valid": "validation samples"}


def changes_since(manifest: Manifest, config: Mapping[str, Any]) -> Changes:
    """What differs between the run that wrote a checkpoint and this one."""
    layout = manifest.layout
    return compare(manifest.config, config, devices=layout.data * layout.model * layout.pipe)


def refuse_model_changes(changes: Changes, *, remedy: str) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        CheckpointError: with every parameter that changes the model, and the remedy.
    """
    if changes.model:
        raise CheckpointError(
            f"the model in the checkpoint is not this configuration's; {_listed(changes.model)}; {remedy}"
        )


def refuse_state_changes(changes: Changes) -> None:
    """Refuse optimizer states that the optimizer of this run cannot continue from.

    Raises:
        CheckpointError: with the parameters that make them useless, and the remedy.
    """
    found = [change for change in changes.training if change.changes_states]
    if found:
        raise CheckpointError(
            f"its optimizer states cannot be used; {_listed(found)}; give the checkpoint's values, or set "
            "no-load-optim: true to begin with new optimizer states"
        )


def log_model_changes(changes: Changes) -> None:
    """Say which parameters change the model that is fine-tuned."""
    if changes.model:
        logger.warning("the model is changed by finetune:\n%s", _table(changes.model))


def log_training_changes(manifest: Manifest, config: Mapping[str, Any], *, keeps_curve: bool) -> None:
    """Say which parameters change the training, and whether samples come in another order.

    Args:
        manifest: of the checkpoint.
        config: of this run.
        keeps_curve: the checkpoint's learning-rate curve is used, so that this run's is not a change.
    """
    changes = changes_since(manifest, config)
    if changes.unknown is not None:
        logger.warning(
            "the checkpoint was written by another version, and its settings are not compared: %s",
            changes.unknown,
        )
    found = [change for change in changes.training if not (keeps_curve and change.label in LEARNING_RATE)]
    if found:
        logger.warning("the training continues with other settings than the checkpoint's:\n%s", _table(found))
    there, here = manifest.config.get(SAMPLES_DIGEST, {}), config.get(SAMPLES_DIGEST, {})
    for part, samples in _PARTS.items():
        if part in there and part in here and there[part] != here[part]:
            logger.warning(
                "%s come in another order than before the checkpoint: some will be read twice, and some not "
                "at all",
                samples,
            )


def training_state(manifest: Manifest) -> dict[str, Any]:
    """State of the training loop; what an older checkpoint lacks is computed from its batch size.

    Raises:
        CheckpointError: it does not say how many samples were read, nor its batch size.
    """
    state, config = dict(manifest.training), manifest.config
    batch = config.get(SAMPLES_PER_ITERATION)
    if batch is not None:
        evaluations = manifest.iteration // int(config.get("eval_interval") or 1)
        state.setdefault("samples", manifest.iteration * batch)
        state.setdefault("validation_samples", evaluations * int(config.get("eval_iters") or 0) * batch)
    elif "iteration" in state and "samples" not in state:
        raise CheckpointError(
            "it does not record how many samples were read; set finetune: true to take the weights alone"
        )
    return state


def _listed(changes: "tuple[Change, ...] | list[Change]") -> str:
    return "; ".join(map(str, changes))


def _table(changes: "tuple[Change, ...] | list[Change]") -> str:
    rows = [("parameter", "checkpoint", "this run")]
    rows += [(change.name, in_words(change.there), in_words(change.here)) for change in changes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line.rstrip()}" for line in lines)

"""Compare a run's settings with those of a checkpoint: refuse incompatible ones, log other differences."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from neox_config import finite_json
from neox_config.errors import ConfigError
from neox_config.facts.curves import CURVES
from neox_config.facts.learning_rate import Curve
from neox_config.problems import in_words
from neox_config.spec.refusals import CURVE_CLASS, Refusal, described_curve
from neox_config.spec.resume import (
    LEARNING_RATE,
    SAMPLES_PER_ITERATION,
    Change,
    Changes,
    compare,
)
from neox_model.checkpoint.contents import Manifest, first_problem, is_count
from neox_model.checkpoint.errors import CheckpointError, DamagedManifestError, quoted

__all__ = [
    "ATTENTION_BACKENDS",
    "DOCUMENTS",
    "SAMPLES_DIGEST",
    "changes_since",
    "check_schedule",
    "counters_of",
    "data_state",
    "log_another_order",
    "log_changes",
    "log_other_versions",
    "log_training_changes",
    "log_unknown_changes",
    "refuse",
    "stored_curve",
    "training_state",
]

logger = logging.getLogger(__name__)

# Recorded with the parameters: digests of the samples read, by part, the documents of the training data, and
# the backend of scaled_dot_product_attention by kind of attention.
SAMPLES_DIGEST = "samples_digest"
DOCUMENTS = "documents"
ATTENTION_BACKENDS = "attention_backends"
_NONE = "none"
# No counters: the result of a forward pass, and the evaluation that is done before the next iteration.
_NO_COUNTERS = ("forward_pass", "due_validation")
# Counts in the training loop's state: those that give the position in the data, and the others.
_USED = {
    "samples": "the number of samples read",
    "validation_samples": "the number of validation samples read",
}
_DONE = {"tokens": "the number of tokens read", "skipped_iterations": "the number of skipped updates"}


def changes_since(manifest: Manifest, config: Mapping[str, Any]) -> Changes:
    """Return the differences between the run that wrote a checkpoint and this run.

    Raises:
        DamagedCheckpointError: the recorded values have another form.
    """
    layout = manifest.layout
    if not isinstance(manifest.config.get(SAMPLES_DIGEST, {}), Mapping):
        raise DamagedManifestError(f"config / {SAMPLES_DIGEST} does not contain digests by name")
    try:
        return compare(manifest.config, config, devices=layout.data * layout.model * layout.pipe)
    except ConfigError as error:
        raise DamagedManifestError(f"config / {error}") from error


def refuse(refusal: Refusal | None) -> None:
    """Raise a refusal of a checkpoint, if there is one.

    Raises:
        CheckpointError: what is wrong and the remedy.
    """
    if refusal is not None:
        raise CheckpointError(str(refusal), code=refusal.code)


def log_unknown_changes(changes: Changes) -> None:
    """Log a warning if the settings could not be compared."""
    if changes.unknown is not None:
        logger.warning(
            "the checkpoint was written by another version, so its settings are not compared: %s",
            changes.unknown,
        )


def log_changes(what: str, changes: Sequence[Change]) -> None:
    """Log what differs, with a table of the parameters that do."""
    rows = [("parameter", "checkpoint", "this run")]
    rows += [(change.name, in_words(change.there), in_words(change.here)) for change in changes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    logger.warning("%s:\n%s", what, "\n".join(f"  {line.rstrip()}" for line in lines))


def log_training_changes(changes: Changes, *, keeps_curve: bool) -> None:
    """Log the parameters that change training.

    Args:
        changes: since the checkpoint.
        keeps_curve: the checkpoint's learning-rate curve is used, so differences of the curve do not count.
    """
    found = [change for change in changes.training if not (keeps_curve and change.label in LEARNING_RATE)]
    if found:
        log_changes("the run continues with settings that differ from the checkpoint's", found)


def log_another_order(manifest: Manifest, config: Mapping[str, Any]) -> None:
    """Log a warning if training samples are in a different order than before the checkpoint.

    Validation samples in a different order change only what is evaluated, which is logged as information.

    Args:
        manifest: the checkpoint's.
        config: this run's.
    """
    there, here = manifest.config.get(SAMPLES_DIGEST, {}), config.get(SAMPLES_DIGEST, {})
    before, now = manifest.config.get(DOCUMENTS), config.get(DOCUMENTS)
    how = "in a different order than before the checkpoint"
    if is_count(before) and is_count(now) and before != now:
        how = f"of other documents than before the checkpoint ({before:,} then, {now:,} now)"
    changed = {part for part in there.keys() & here.keys() if there[part] != here[part]}
    if "train" in changed:
        logger.warning("training samples are %s: some will be read twice, others not at all", how)
    if "valid" in changed:
        logger.info(
            "validation samples differ from those before the checkpoint: the run is the same, but its "
            "validation losses are computed on other samples"
        )


def log_other_versions(manifest: Manifest, packages: Mapping[str, str]) -> None:
    """Log the packages whose versions differ from those that wrote the checkpoint, if it records them.

    Args:
        manifest: the checkpoint's.
        packages: versions of this run.
    """
    there = manifest.packages
    names = sorted(name for name in there.keys() | packages.keys() if there.get(name) != packages.get(name))
    if there and names:
        listed = "; ".join(
            f"{quoted(name)} {quoted(there.get(name, _NONE))} in the checkpoint, "
            f"{packages.get(name, _NONE)} in this run"
            for name in names
        )
        logger.warning("the checkpoint was written with other versions: %s", listed)


def check_schedule(manifest: Manifest) -> None:
    """Check that the checkpoint records a learning-rate schedule.

    Raises:
        DamagedCheckpointError: the curve or the number of updates is missing.
    """
    saved = manifest.schedule
    if not isinstance(saved.get("curve"), Mapping) or not is_count(saved.get("applied_updates")):
        raise DamagedManifestError("schedule has no curve or no applied_updates")


def stored_curve(manifest: Manifest) -> Curve:
    """Return the learning-rate curve of a checkpoint.

    Raises:
        DamagedCheckpointError: it is missing, its class is unknown, or a value is not valid.
    """
    check_schedule(manifest)
    name = described_curve(manifest.schedule)[CURVE_CLASS]
    kind = CURVES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise DamagedManifestError(f"schedule / class: {quoted(str(name))!r} is none of {', '.join(CURVES)}")
    try:
        text = finite_json.dumps(manifest.schedule["curve"])
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise DamagedManifestError(first_problem(error, "schedule", "curve")) from error


def training_state(manifest: Manifest) -> dict[str, Any]:
    """Return the state of the training loop, with entries that older checkpoints lack computed.

    Raises:
        CheckpointError: the checkpoint lacks a count, and its parameters do not determine it.
    """
    return data_state(manifest, required=_USED | _DONE)


def counters_of(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters in the state of the training loop."""
    return {name: value for name, value in training.items() if name not in _NO_COUNTERS}


def data_state(manifest: Manifest, required: Mapping[str, str] = _USED) -> dict[str, Any]:
    """Return the state of the training loop as far as it is known, with the position in the data.

    Args:
        manifest: the checkpoint's.
        required: counts that must be known, described.

    Raises:
        CheckpointError: the checkpoint lacks the position, and its parameters do not determine it.
        DamagedCheckpointError: one of these parameters is not a count.
    """
    state, config = {"iteration": manifest.iteration, **manifest.training}, manifest.config
    batch = _count(config, SAMPLES_PER_ITERATION)
    if batch is not None:
        evaluations = manifest.iteration // (_count(config, "eval_interval") or 1)
        state.setdefault("samples", manifest.iteration * batch)
        state.setdefault("validation_samples", evaluations * (_count(config, "eval_iters") or 0) * batch)
    missing = [what for name, what in required.items() if name not in state]
    if missing:
        raise CheckpointError(
            f"the checkpoint does not record {' or '.join(missing)}; set finetune: true to load only the "
            "weights"
        )
    is_one_size = batch is not None and state["samples"] == manifest.iteration * batch
    state.setdefault("batch_sizes", [[0, batch]] if is_one_size else [])
    return state


def _count(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value is not None and not is_count(value):
        raise DamagedManifestError(f"config / {name} is not a count")
    return value

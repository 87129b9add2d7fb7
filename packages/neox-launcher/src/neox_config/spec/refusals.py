"""Why a run cannot continue from a checkpoint; the launcher asks before the start, and the workers again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose, prod
from typing import Any

from pydantic import TypeAdapter, ValidationError

from neox_config.errors import ConfigError
from neox_config.facts.curves import CURVES
from neox_config.facts.learning_rate import Curve, WarmupStableDecay, WarmupThenDecay
from neox_config.facts.optimizers import FORMS_OF_ADAM, OPTIMIZER_FACTS
from neox_config.problems import in_words
from neox_config.spec.resolve import Resolved
from neox_config.spec.resume import (
    IN_EFFECT,
    Change,
    Changes,
    compare,
    flat_values,
    in_effect,
    optimizer_kind,
)

__all__ = [
    "CURVE_CLASS",
    "OR_FINETUNE",
    "SAME_MODEL",
    "Refusal",
    "described_curve",
    "other_model",
    "other_optimizer",
    "other_schedule",
    "other_states",
    "refusals_of",
]

CURVE_CLASS = "class"
"""Entry of a checkpoint's schedule with the curve's class, besides its values."""

SAME_MODEL = "set the checkpoint's values, or set load to another folder"
"""What to do about a different model without training it."""

OR_FINETUNE = (
    "set the checkpoint's values, or set load, save and log-dir to other folders to train this model from "
    "new weights, or, if all weights have the same shapes, set finetune: true to load only these"
)
"""What to do about a different model in a run."""

# Values of a model that follow from its tokenizer.
_OF_TOKENIZER = {"vocab_file", "tokenizer_type", "make_vocab_size_divisible_by"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a checkpoint does not fit a run, and what to do."""

    what: str
    remedy: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


def refusals_of(
    contents: Mapping[str, Mapping[str, Any]], resolved: Resolved, *, trains: bool, iteration: int | None
) -> list[Refusal]:
    """Return why a run cannot load a checkpoint, as far as that follows from its manifest.

    Args:
        contents: those of the manifest: config, layout and schedule. Damaged ones are not compared.
        resolved: configuration of the run.
        trains: the run continues the one of the checkpoint, and does not only use the model.
        iteration: iteration of the checkpoint; None if it is not known.
    """
    config = resolved.config
    here = flat_values(config) | {IN_EFFECT: in_effect(resolved)}
    try:
        devices = prod(int(contents["layout"][name]) for name in ("data", "model", "pipe"))
        changes = compare(contents["config"], here, devices=devices)
    except (ConfigError, LookupError, TypeError, ValueError):
        return []
    found = [other_model(changes, remedy=OR_FINETUNE if trains else SAME_MODEL)]
    if trains and not config.checkpoint.no_load_optim:
        optimizer = config.optimizer.optimizer.kind
        found.append(other_optimizer(optimizer_kind(contents["config"]), optimizer) or other_states(changes))
    schedule, section, curve = contents.get("schedule", {}), config.lr_schedule, resolved.update.curve
    is_recorded = isinstance(schedule.get("curve"), Mapping)
    if trains and not section.use_checkpoint_lr_scheduler and is_recorded and curve is not None:
        refusal = other_schedule(schedule, curve)
        last = config.training.iterations
        if refusal is not None and iteration is not None and iteration >= last:
            # Also with override_lr_scheduler: no iteration would use the other learning rate.
            found.append(_nothing_left(iteration, last))
        elif not section.override_lr_scheduler:
            found.append(refusal)
    return [refusal for refusal in found if refusal is not None]


def other_model(changes: Changes, *, remedy: str) -> Refusal | None:
    """Return the refusal of a checkpoint of another model, with every parameter that changes it."""
    if not changes.model:
        return None
    labels = {change.label for change in changes.model}
    if "vocab_file" in labels and labels <= _OF_TOKENIZER:
        return Refusal(
            f"the model was trained with another tokenizer: {_listed(changes.model)}",
            "set vocab-file to the tokenizer of that run, or set load to another folder",
            "other-tokenizer",
        )
    what = f"the checkpoint contains a different model: {_listed(changes.model)}"
    return Refusal(what, remedy, "different-model")


def other_optimizer(there: str, here: str) -> Refusal | None:
    """Return the refusal of the states of another optimizer; all forms of Adam have the same."""
    if there == here or {there, here} <= FORMS_OF_ADAM:
        return None
    stored, ours = (OPTIMIZER_FACTS[kind].name if kind in OPTIMIZER_FACTS else kind for kind in (there, here))
    return Refusal(
        f"the checkpoint's optimizer states are those of {stored}, but this run's optimizer is {ours}",
        "use the same optimizer, or set no-load-optim: true to start with new optimizer states",
    )


def other_states(changes: Changes) -> Refusal | None:
    """Return the refusal of optimizer states that this run's optimizer cannot use."""
    found = [change for change in changes.training if change.changes_states]
    if not found:
        return None
    return Refusal(
        f"the checkpoint's optimizer states cannot be used: {_listed(found)}",
        "set the checkpoint's values, or set no-load-optim: true to start with new optimizer states",
    )


# Fields of a learning-rate curve -> names of the parameters that set them, if these differ.
_NAMES_OF_CURVES = {
    "decay_iterations": "lr-decay-iters (by default train-iters)",
    "floor": "min-lr",
    "iterations": "train-iters",
    "peak": "lr",
    "style": "lr-decay-style",
}


def other_schedule(schedule: Mapping[str, Any], curve: Curve) -> Refusal | None:
    """Return the refusal of a learning-rate curve that differs from the recorded one.

    Curves of wsd may differ in the updates to come: when they decay is decided while they are constant.
    """
    there, here = described_curve(schedule), _described(curve)
    if there == here or _continues(there, schedule.get("applied_updates"), curve):
        return None
    what = "the checkpoint's learning-rate schedule differs from the configuration's"
    return Refusal(
        f"{what}: {_differing(there, here)}",
        "set override-lr-scheduler: true to use the configuration's, or use-checkpoint-lr-scheduler: true to "
        "use the checkpoint's",
    )


def _described(curve: Curve) -> dict[str, Any]:
    # As JSON, which has no tuples.
    return {CURVE_CLASS: type(curve).__name__, **TypeAdapter(type(curve)).dump_python(curve, mode="json")}


def _continues(there: Mapping[str, Any], applied: Any, curve: Curve) -> bool:
    """Return True if a curve of wsd has the rates of the recorded one in all updates that were applied."""
    kind = CURVES.get(there[CURVE_CLASS])
    if kind is None or not issubclass(kind, WarmupStableDecay) or not isinstance(curve, WarmupStableDecay):
        return False
    if not isinstance(applied, int):
        return False
    values = {name: value for name, value in there.items() if name != CURVE_CLASS}
    try:
        before = TypeAdapter(kind).validate_python(values)
    except ValidationError:
        return False
    # Between two turns a rate is constant, or follows one formula.
    turns = {turn + step for each in (before, curve) for turn in each.turns() for step in (-1, 1)}
    updates = {update for update in turns | {applied - 1} if 0 <= update < applied}
    return all(isclose(before.rate(update), curve.rate(update), rel_tol=1e-9) for update in updates)


def _nothing_left(iteration: int, last: int) -> Refusal:
    """Return the refusal of a longer run's checkpoint, after which this one has nothing to train."""
    return Refusal(
        f"the checkpoint is at iteration {iteration:,} and train-iters is {last:,}, so that nothing is left "
        "to train",
        f"set train-iters above {iteration:,} and override-lr-scheduler: true in the file to continue, or "
        "set load, save and log-dir to other folders for a new run",
    )


def described_curve(schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Return class and values of a recorded curve; earlier versions had one class and did not store it."""
    return {CURVE_CLASS: schedule.get(CURVE_CLASS, WarmupThenDecay.__name__), **schedule["curve"]}


def _differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return what differs between two curves; of two classes only their names, as all values differ."""
    if there[CURVE_CLASS] != here[CURVE_CLASS]:
        return f"it is {in_words(there[CURVE_CLASS])} in the checkpoint, {here[CURVE_CLASS]} in this run"
    names = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    return "; ".join(
        f"{_NAMES_OF_CURVES.get(name, name)} is {in_words(there.get(name))} in the checkpoint, "
        f"{in_words(here.get(name))} in this run"
        for name in names
    )


def _listed(changes: Sequence[Change]) -> str:
    return "; ".join(map(str, changes))

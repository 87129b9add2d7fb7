"""The state of a training, for one that continues at its iteration with new optimizer states."""

from dataclasses import asdict
from typing import Any

from neox_config.facts.learning_rate import Curve
from neox_config.schema.sections.training import TrainingSection
from neox_config.spec.refusals import CURVE_CLASS
from neox_model.convert.neox.files import NeoXFiles

__all__ = ["recorded_progress"]


def recorded_progress(
    files: NeoXFiles, curve: Curve | None, section: TrainingSection, *, seq_length: int, iteration: int
) -> dict[str, Any]:
    """Return the entries of a manifest that describe a training.

    Samples are counted as DeepSpeed recorded them. Without them, or without a curve, there is no state, so
    that a training can start from the weights, but not continue.

    Args:
        files: the checkpoint.
        curve: its learning rate; None: it follows from train_epochs, so from data that is not read here.
        section: evaluations of its training.
        seq_length: tokens of a sample.
        iteration: finished iterations.
    """
    samples, skipped = (_count(files, name) for name in ("global_samples", "skipped_steps"))
    if curve is None or samples is None or (samples == 0) != (iteration == 0):
        return {}
    evaluations = iteration // section.eval_interval
    batch = samples // iteration if iteration else 0
    return {
        "training": {
            "iteration": iteration,
            "samples": samples,
            "tokens": samples * seq_length,
            "skipped_iterations": skipped or 0,
            "validation_samples": evaluations * section.eval_iters * batch,
            "batch_sizes": [[0, batch]] if iteration and samples % iteration == 0 else [],
        },
        "engine": {"global_steps": iteration, "global_samples": samples},
        "schedule": {
            CURVE_CLASS: type(curve).__name__,
            "curve": asdict(curve),
            "applied_updates": iteration - (skipped or 0),
        },
    }


def _count(files: NeoXFiles, name: str) -> int | None:
    found = files.recorded(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None

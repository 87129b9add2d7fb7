"""The configuration that is written with an imported model."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neox_config.schema.config import as_written

__all__ = ["CONFIGURATION", "TRAINING", "write_settings"]

CONFIGURATION = "model.yml"
"""Name of the file."""

# What other runs of the model keep comes first: the documentation cuts the file at the training. The
# dropouts are among it, because their defaults are 0.1, as in GPT-NeoX.
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Tokenizer": ("tokenizer-type", "vocab-file", "merge-file"),
    "Adapters": ("lora-base", "lora-rank", "lora-alpha", "lora-dropout", "lora-target-modules"),
    "Generation: tokens at which transformers ends a text, too": ("stop-tokens",),
    "Export: the class of transformers that to-hf writes": ("hf-family",),
    "Dropout: as in the model's configuration": ("hidden-dropout", "attention-dropout"),
    "Training: a start for fine-tuning": (
        *("train-micro-batch-size-per-gpu", "gradient-accumulation-steps", "train-iters", "precision"),
        *("optimizer", "zero-optimization", "gradient-clipping", "weight-decay", "lr-decay-style", "warmup"),
        *("save-interval-minutes", "log-interval"),
    ),
    "Weights": ("load", "finetune"),
}
_MODEL = "Model; other values are another model"
TRAINING: Mapping[str, Any] = {
    "train-micro-batch-size-per-gpu": 1,
    "gradient-accumulation-steps": 1,
    "train-iters": 1000,
    "optimizer": {"type": "Adam", "params": {"lr": 1.0e-5, "betas": [0.9, 0.95], "eps": 1.0e-8}},
    "zero-optimization": {"stage": 1},
    "gradient-clipping": 1.0,
    "weight-decay": 0.1,
    "lr-decay-style": "cosine",
    "warmup": 0.01,
    # By time, because a save-interval suits one train-iters alone.
    "save-interval-minutes": 30,
    "log-interval": 10,
}
"""Parameters of a run that continues an imported model."""


def write_settings(
    path: Path,
    model: Mapping[str, Any],
    *,
    source: Path,
    output: Path,
    command: str = "from-hf",
    notes: Sequence[str] = (),
) -> None:
    """Write a configuration that trains, generates with and evaluates the model.

    Args:
        path: the file.
        model: parameters of the model and its tokenizer.
        source: the folder that it came from.
        output: the folder that will contain it.
        command: the conversion.
        notes: further lines of its comment.
    """
    settings = as_written({**model, **TRAINING, "load": str(output), "finetune": True})
    grouped = {name for names in _GROUPS.values() for name in names}
    groups = {_MODEL: [name for name in settings if name not in grouped], **_GROUPS}
    here = shlex.quote(str(output / path.name))
    lines = [
        f"# Written by neox-convert {command} from {_value(str(source))}.",
        "#",
        f"#   neox-launch generate --config {here}",
        f"#   neox-launch --config {here} --set data-path=PREFIX --set save=FOLDER --set log-dir=FOLDER",
        "#",
        "# To resume such a run, also pass --set load=FOLDER --set finetune=false; if train-iters",
        "# is changed, --set override-lr-scheduler=true as well.",
        *(f"# {note}".rstrip() for note in notes),
    ]
    for title, names in groups.items():
        given = [name for name in names if name in settings]
        lines += ["", f"# --- {title}"] if given else []
        lines += [f"{name}: {_value(settings[name])}" for name in given]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _value(value: Any) -> str:
    """Return a value as YAML; JSON is YAML, and its strings cannot be mistaken for something else."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)

"""The model of a checkpoint, from what its manifest records."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from neox_config.errors import ConfigError
from neox_config.facts.attention import BIASED_SCORES
from neox_config.facts.checkpoints import (
    LATEST,
    MANIFEST,
    complete_checkpoints,
    is_checkpoint,
    iteration_of,
)
from neox_config.schema.config import NeoXConfig, sections
from neox_config.schema.sections.model import Fusion
from neox_config.spec.resolve import Resolved, resolve

__all__ = [
    "FORMER_WIDTH",
    "MODEL_SECTIONS",
    "contents_of",
    "fusions_off",
    "latest_checkpoint",
    "model_of",
    "recorded_model",
    "recorded_sections",
]

MODEL_SECTIONS = ("model", "mup", "attention", "experts", "tokenizer")
"""Sections of the configuration that determine the logits, and the tokenizer."""

FORMER_WIDTH = "intermediate_size"
"""Versions without mlp_width recorded it under this name, whose meaning is another one today."""

_CONTENTS = ("config", "files", "layout", "schedule", "tensors")


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that a run with this `load` reads; None if this machine finds or reads none.

    It is the one that `latest` names, without that file the folder itself if it is a checkpoint, or the last
    one in it.
    """
    with suppress(OSError, UnicodeDecodeError):
        if not (folder / LATEST).exists():
            return folder if is_checkpoint(folder) else next(reversed(complete_checkpoints(folder)), None)
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
        # A name, not a path.
        if iteration_of(name) is not None and (folder / name / MANIFEST).is_file():
            return folder / name
    return None


def contents_of(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of a checkpoint's manifest; none if it is damaged, which the workers report."""
    try:
        contents = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["contents"]
        return {name: dict(contents.get(name, {})) for name in _CONTENTS}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def recorded_sections(recorded: Mapping[str, Any], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return recorded parameters by section, under today's names; others are left out."""
    kinds = sections()
    values: dict[str, dict[str, Any]] = {
        section: {name: recorded[name] for name in kinds[section].model_fields.keys() & recorded.keys()}
        for section in names
    }
    if "mlp_width" not in recorded:
        values["model"]["mlp_width"] = values["model"].pop(FORMER_WIDTH, None)
    return values


def model_of(recorded: Mapping[str, Any]) -> Resolved:
    """Return the model's parameters in recorded values, without what affects only how it is computed.

    Args:
        recorded: values by name, as `flat_values` returns them; others than the model's are not used.

    Raises:
        ConfigError: they are not those of a model of this version.
        ValidationError: likewise.
    """
    values = recorded_sections(recorded, (*MODEL_SECTIONS, "objective"))
    # Required of every configuration, and without effect on the model.
    values["training"] = {"train_micro_batch_size_per_gpu": 1, "train_iters": 1}
    values["optimizer"] = {"optimizer": {"type": "Adam", "params": {"lr": 1.0, "weight_decay": 0.0}}}
    return resolve(_without_fused_operators(NeoXConfig.from_sections(values)), devices=1)


def _without_fused_operators(config: NeoXConfig) -> NeoXConfig:
    """Return the same model computed with plain operators, for sequences of every length."""
    model, attention = config.model, config.attention
    # Without a bias on attention scores, layer scaling changes only how they are rounded.
    scales = attention.apply_query_key_layer_scaling and attention.pos_emb in BIASED_SCORES
    is_tanh = model.openai_gelu or bool(model.bias_gelu_fusion)
    update = {
        "model": model.replaced(
            **fusions_off(model),
            openai_gelu=is_tanh,
            onnx_safe=False,
            seq_length=model.max_position_embeddings,
        ),
        "attention": attention.replaced(**fusions_off(attention), apply_query_key_layer_scaling=scales),
    }
    return config.model_copy(update=update)


def recorded_model(folder: Path) -> Resolved | None:
    """Return the parameters of the model in the latest checkpoint of a folder; None if it cannot be read."""
    try:
        checkpoint = latest_checkpoint(folder)
        recorded = {} if checkpoint is None else contents_of(checkpoint).get("config", {})
        return model_of(recorded) if recorded else None
    except (ValidationError, ConfigError):
        return None


def fusions_off(section: Any) -> dict[str, bool]:
    """Return the parameters of a section that choose how the model is computed, all False."""
    fields: Mapping[str, Any] = type(section).model_fields
    kinds = set(get_args(Fusion))
    return {name: False for name, field in fields.items() if set(get_args(field.annotation)) == kinds}

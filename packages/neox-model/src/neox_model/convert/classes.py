"""The class of transformers that a config.json names; without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neox_config.facts.hugging_face import CLASSES
from neox_model.convert.errors import ConversionError

__all__ = ["model_type_of"]

_PARTS: Mapping[str, str] = {"gemma3": "gemma3_text"}
"""`model_type` of a model with images -> that of its part for text."""


def model_type_of(config: Mapping[str, Any], path: str | Path = "config.json") -> str:
    """Return the `model_type` of a config.json, whose class can be converted.

    Code in the folder (`auto_map`) is never run: as in transformers, its own class is used where it has one.

    Args:
        config: its contents.
        path: what messages call it.

    Raises:
        ConversionError: it names no class, or one that cannot be converted.
    """
    known = ", ".join(CLASSES.values())
    name, classes = config.get("model_type"), config.get("architectures") or []
    if name in _PARTS:
        raise ConversionError(
            f"{path} is of a model with images ({name}); save its part for text, whose model_type is "
            f"{_PARTS[str(name)]}, with transformers, and convert that"
        )
    chosen = CLASSES.get(name) if isinstance(name, str) else None
    is_list = isinstance(classes, list)
    if chosen is None or not is_list or (classes and chosen not in classes):
        if "auto_map" in config:
            raise ConversionError(
                f"{path} names code in the model's folder (auto_map), which is never run; only "
                f"transformers' own classes can be converted: {known}"
            )
        raise ConversionError(
            f"{path} has model_type {name!r} with architectures {classes}; only {known} can be converted; "
            "convert another model, or add this one (docs/add-an-architecture.md)"
        )
    return str(name)

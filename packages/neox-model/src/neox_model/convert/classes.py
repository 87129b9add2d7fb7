"""The classes of transformers that can be converted, by their `model_type`; without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neox_model.convert.errors import ConversionError

__all__ = ["CLASSES", "model_type_of"]

CLASSES: Mapping[str, str] = {
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "opt": "OPTForCausalLM",
}
"""`model_type` -> name of the class."""


def model_type_of(config: Mapping[str, Any], path: str | Path = "config.json") -> str:
    """Return the `model_type` of a config.json, whose class can be converted.

    Args:
        config: its contents.
        path: what messages call it.

    Raises:
        ConversionError: it names no class, or one that cannot be converted.
    """
    known = ", ".join(CLASSES.values())
    if "auto_map" in config:
        raise ConversionError(
            f"{path} names code in the model's folder (auto_map), which is never run; only "
            f"transformers' own classes can be converted: {known}"
        )
    name, classes = config.get("model_type"), config.get("architectures") or []
    chosen = CLASSES.get(name) if isinstance(name, str) else None
    is_list = isinstance(classes, list)
    if chosen is None or not is_list or (classes and chosen not in classes):
        raise ConversionError(
            f"{path} has model_type {name!r} with architectures {classes}; only {known} can be converted; "
            "convert another model, or add this one (docs/add-an-architecture.md)"
        )
    return str(name)

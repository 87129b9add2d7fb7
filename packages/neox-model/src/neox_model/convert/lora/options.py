"""The options in PEFT's `adapter_config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neox_model.convert.errors import ConversionError
from neox_model.convert.reference import lora_defaults
from neox_model.convert.tokenizer_files import read_json
from neox_model.inspection.recognition import ADAPTERS

__all__ = ["Options", "read_options"]

_KIND = {"peft_type": ("LORA",), "task_type": ("CAUSAL_LM", None)}
# How B and A were initialized; other ways change the weights of the base as well.
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
_READ = {*_KIND, "r", "lora_alpha", "lora_dropout", "fan_in_fan_out", "init_lora_weights"}
# These name modules, of which the stored tensors show the result, or have no effect on a trained adapter.
_FREE = {
    *("target_modules", "exclude_modules", "base_model_name_or_path", "revision", "inference_mode"),
    *("peft_version", "megatron_core", "eva_config", "ensure_weight_tying", "auto_mapping"),
}
_REASONS: Mapping[str, str] = {
    "use_rslora": "divides alpha by the square root of the rank, which no lora-alpha gives exactly",
    "use_dora": "trains the lengths of the weights' columns as well",
    "bias": "trains biases of the model as well",
    "lora_bias": "adds biases to the adapters",
    "modules_to_save": "trains whole modules as well",
    "trainable_token_indices": "trains rows of the embedding as well",
    "rank_pattern": "gives modules different ranks",
    "alpha_pattern": "gives modules different factors",
    "layers_to_transform": "leaves layers without adapters",
    "layer_replication": "repeats layers of the model",
    "target_parameters": "adapts parameters of other modules than linear ones",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What an adapter is besides its tensors.

    Args:
        rank: rows of A.
        alpha: scale of the output.
        dropout: of the adapters' input in a training.
    """

    rank: int
    alpha: float
    dropout: float


def read_options(folder: Path, *, is_transposed: bool) -> Options:
    """Return the options of PEFT's adapters, all of which ours can have.

    Args:
        folder: with `adapter_config.json`.
        is_transposed: the base's matrices are stored as input by output.

    Raises:
        ConversionError: an option is missing, or ours cannot have it.
    """
    path = folder / ADAPTERS
    found = read_json(path)
    for name, allowed in _KIND.items():
        if found.get(name) not in allowed:
            raise ConversionError(
                f"{path} has {name}: {found.get(name)!r}, but only {allowed[0]} can be converted"
            )
    if found.get("init_lora_weights", True) not in _INITIAL:
        raise ConversionError(
            f"{path} has init_lora_weights: {found['init_lora_weights']!r}, with which peft also changes the "
            "weights of the base; save the adapters as plain ones with peft, relative to the original base"
        )
    if bool(found.get("fan_in_fan_out", False)) != is_transposed:
        stored = "input by output" if is_transposed else "output by input"
        raise ConversionError(
            f"{path} has fan_in_fan_out: {found.get('fan_in_fan_out')!r}, which does not fit the class of "
            f"the base, whose matrices are stored {stored}; correct it"
        )
    defaults = lora_defaults()
    for name, value in found.items():
        if name in _READ | _FREE or not value or value == defaults.get(name):
            continue
        why = _REASONS.get(name, "neox-model's adapters do not have")
        raise ConversionError(
            f"{path} has {name}: {value!r}, which {why}; only adapters without it can be converted: merge it "
            "into the model with peft (merge_and_unload), and convert the model with neox-convert from-hf"
        )
    return Options(
        _rank(path, found), _number(path, found, "lora_alpha"), _number(path, found, "lora_dropout")
    )


def _rank(path: Path, found: Mapping[str, Any]) -> int:
    rank = found.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ConversionError(f"{path} has r: {rank!r}, not a rank of at least 1; copy it again")
    return rank


def _number(path: Path, found: Mapping[str, Any], name: str) -> float:
    value = found.get(name, 0.0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (0 < value < float("inf") if name == "lora_alpha" else 0 <= value < 1):
        raise ConversionError(f"{path} has {name}: {value!r}, which adapters cannot have; copy it again")
    return value

"""The options in PEFT's `adapter_config.json`."""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from neox_model.convert.errors import ConversionError
from neox_model.convert.reference import lora_defaults
from neox_model.convert.tokenizer_files import read_json
from neox_model.inspection.finding import ADAPTERS

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


@dataclass(frozen=True, slots=True)
class Options:
    """What an adapter is besides its tensors.

    Args:
        rank: rows of A.
        alpha: scale of the output.
        dropout: of the adapters' input in a run.
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
    refused = {name: found.get(name) for name, allowed in _KIND.items() if found.get(name) not in allowed}
    if found.get("init_lora_weights", True) not in _INITIAL:
        refused["init_lora_weights"] = found["init_lora_weights"]
    if bool(found.get("fan_in_fan_out", False)) != is_transposed:
        refused["fan_in_fan_out"] = found.get("fan_in_fan_out")
    defaults = lora_defaults()
    refused |= {
        name: value
        for name, value in found.items()
        if name not in _READ | _FREE and value and value != defaults.get(name)
    }
    for name, value in refused.items():
        raise ConversionError(
            f"{path} has {name}: {value!r}, which neox-model's adapters of this base do not have; merge the "
            "adapters into the model with peft (merge_and_unload), and convert the model with neox-convert "
            "from-hf"
        )
    read: dict[str, Any] = {"r": None, "lora_alpha": 0.0, "lora_dropout": 0.0, **found}
    rank, alpha, dropout = read["r"], read["lora_alpha"], read["lora_dropout"]
    are_numbers = type(rank) is int and {type(alpha), type(dropout)} <= {int, float}
    if not are_numbers or not (rank >= 1 and 0 < alpha < inf and 0 <= dropout < 1):
        raise ConversionError(
            f"{path} has r: {rank!r}, lora_alpha: {alpha!r} and lora_dropout: {dropout!r}, which adapters "
            "cannot have; copy it again"
        )
    return Options(rank, alpha, dropout)

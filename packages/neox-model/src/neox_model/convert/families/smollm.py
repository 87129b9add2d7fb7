"""SmolLM3, some of whose layers have no positions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neox_config.spec.values import Each
from neox_model.convert.errors import ConversionError
from neox_model.convert.families.family import HeadDim
from neox_model.convert.families.llama import ATTENTION_BIAS, MLP_BIAS, entries, like_llama
from neox_model.convert.families.rotary import RotaryBase, RotaryScaling
from neox_model.convert.families.values import in_layers, whole_number
from neox_model.convert.families.windows import ChosenWindows

__all__ = ["SMOLLM3"]

_POSITION = "layers.mixer.position"


def _rotated(config: Mapping[str, Any]) -> list[int]:
    """Return 1 for each layer with rotary positions, 0 for others."""
    count, found = config["num_hidden_layers"], config.get("no_rope_layers")
    if found is None:
        every = whole_number(config.get("no_rope_layer_interval", 4), "no_rope_layer_interval")
        found = [int((index + 1) % every != 0) for index in range(count)]
    if isinstance(found, list) and len(found) >= count and all(each in (0, 1) for each in found):
        return found[:count]
    raise ConversionError(
        f"config.json has no_rope_layers: {found!r}, which is not a list of 0 or 1 for each of {count} "
        "layers; correct it, or copy the folder again"
    )


def _without_positions(config: Mapping[str, Any]) -> list[bool]:
    return [not each for each in _rotated(config)]


@dataclass(frozen=True, slots=True)
class _RotatedLayers:
    """`no_rope_layers`."""

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {_POSITION: Each(tuple("Rotary" if each else None for each in _rotated(config)))}

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        config["no_rope_layers"] = [int(each == "Rotary") for each in in_layers(model, _POSITION)]


SMOLLM3 = like_llama(
    "smollm3",
    (
        *entries(4, rotary=(RotaryBase(default=2000000.0), RotaryScaling()), tied=True),
        HeadDim(),
        ATTENTION_BIAS,
        MLP_BIAS,
        _RotatedLayers(),
        ChosenWindows(None, _without_positions),
    ),
)

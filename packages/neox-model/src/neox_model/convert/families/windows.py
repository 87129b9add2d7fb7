"""Entries of sliding windows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neox_model.convert.architecture import Architecture
from neox_model.convert.errors import ConversionError
from neox_model.convert.families.values import number, whole_number

__all__ = ["ChosenWindows", "NoWindows", "OneWindow"]

_FULL, _SLIDING = "full_attention", "sliding_attention"


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the tokens that a token sees, itself included; None if every sequence fits into them.

    Raises:
        ConversionError: it is only the token itself.
    """
    tokens = config.get("sliding_window")
    if tokens is None:
        return None
    tokens = whole_number(tokens, "sliding_window")
    if tokens == 1:
        # The cache keeps `keys[-sliding_window + 1:]`, which for 1 are all of them.
        raise ConversionError(
            "config.json has sliding_window: 1, with which transformers computes other results with its "
            "cache than without; only windows of 2 tokens or more can be converted"
        )
    return None if tokens >= config["max_position_embeddings"] else tokens


def _kinds(config: Mapping[str, Any]) -> list[str] | None:
    """Return the kind of each layer; None if they are not listed."""
    kinds, count = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is None:
        return None
    if isinstance(kinds, list) and len(kinds) == count and all(each in (_FULL, _SLIDING) for each in kinds):
        return kinds
    raise ConversionError(
        f"config.json has layer_types: {kinds!r}, which is not a list of {_FULL} or {_SLIDING} for each of "
        f"{count} layers; correct it, or copy the folder again"
    )


@dataclass(frozen=True, slots=True)
class NoWindows:
    """Every token sees all earlier ones; there is no entry.

    Args:
        layers: entry with the number of layers.
    """

    layers: str = "num_hidden_layers"
    field: str = "windows"
    keys: tuple[str, ...] = ()

    def read(self, config: Mapping[str, Any]) -> tuple[int | None, ...]:
        """Return None for every layer."""
        return (None,) * config[self.layers]

    def write(self, architecture: Architecture, config: dict[str, Any]) -> None:
        """Add nothing."""


@dataclass(frozen=True, slots=True)
class OneWindow:
    """All layers have the same window."""

    field: str = "windows"
    keys: tuple[str, ...] = ("sliding_window",)

    def read(self, config: Mapping[str, Any]) -> tuple[int | None, ...]:
        """Return the window of every layer.

        Raises:
            ConversionError: layers differ.
        """
        kinds = set(_kinds(config) or ())
        if len(kinds) > 1:
            raise ConversionError(
                "config.json has several layer_types, but this class has one for all layers"
            )
        # The class of transformers uses a default if the entry is absent, and none if it is null.
        default = {} if "sliding_window" in config else {"sliding_window": 4096}
        return (_window({**config, **default}),) * config["num_hidden_layers"]

    def write(self, architecture: Architecture, config: dict[str, Any]) -> None:
        """Add the window."""
        config["sliding_window"] = architecture.windows[0]


@dataclass(frozen=True, slots=True)
class ChosenWindows:
    """Some layers have a window."""

    field: str = "windows"
    keys: tuple[str, ...] = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

    def read(self, config: Mapping[str, Any]) -> tuple[int | None, ...]:
        """Return the window of each layer."""
        count = config["num_hidden_layers"]
        if not config.get("use_sliding_window"):
            return (None,) * count
        window = _window({"sliding_window": 4096, **config})
        kinds = _kinds(config)
        if kinds is None:
            first = number(config.get("max_window_layers", 28), "max_window_layers")
            kinds = [_SLIDING if index >= first else _FULL for index in range(count)]
        return tuple(window if kind == _SLIDING else None for kind in kinds)

    def write(self, architecture: Architecture, config: dict[str, Any]) -> None:
        """Add the window and the type of each layer."""
        sizes = [window for window in architecture.windows if window is not None]
        config["use_sliding_window"] = bool(sizes)
        config["sliding_window"] = sizes[0] if sizes else None
        config["layer_types"] = [_FULL if window is None else _SLIDING for window in architecture.windows]
        with_window = [index for index, kind in enumerate(config["layer_types"]) if kind == _SLIDING]
        config["max_window_layers"] = with_window[0] if with_window else len(config["layer_types"])

"""Entries of sliding windows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neox_config.spec.values import Each
from neox_model.convert.errors import ConversionError
from neox_model.convert.families.values import in_layers, number, whole_number

__all__ = ["FULL", "SLIDING", "ChosenWindows", "OneWindow", "RepeatedWindows", "window_sizes"]

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers: without a window, and with one."""
_PATTERN = "layers.mixer.pattern"
_BEFORE = f"{_PATTERN}.before"


def _windows(config: Mapping[str, Any], slides: Sequence[bool]) -> dict[str, Any]:
    """Return the windows of the layers that have one."""
    tokens = config.get("sliding_window")
    if tokens is None:
        return {}
    return {
        _PATTERN: Each(tuple("Window" if each else None for each in slides)),
        f"{_PATTERN}.block": 1,
        _BEFORE: whole_number(tokens, "sliding_window") - 1,
    }


def window_sizes(model: Mapping[str, Any]) -> list[int | None]:
    """Return how many tokens a token of each layer sees, itself included; None: all earlier ones."""
    pairs = zip(in_layers(model, _PATTERN), in_layers(model, _BEFORE), strict=True)
    return [before + 1 if pattern == "Window" else None for pattern, before in pairs]


def _kinds(config: Mapping[str, Any]) -> list[str] | None:
    """Return the kind of each layer; None if they are not listed."""
    kinds, count = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is None:
        return None
    if isinstance(kinds, list) and len(kinds) == count and all(each in (FULL, SLIDING) for each in kinds):
        return kinds
    raise ConversionError(
        f"config.json has layer_types: {kinds!r}, which is not a list of {FULL} or {SLIDING} for each of "
        f"{count} layers; correct it, or copy the folder again"
    )


@dataclass(frozen=True, slots=True)
class OneWindow:
    """All layers have the same window.

    Args:
        default: the window if the entry is absent; null is none.
        switch: an entry that must be true; none if empty.
    """

    default: int | None = 4096
    switch: str = ""

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the window of every layer."""
        kinds = set(_kinds(config) or ())
        if len(kinds) > 1:
            raise ConversionError(
                "config.json has several layer_types, but this class has one for all layers"
            )
        if self.switch and not config.get(self.switch):
            return {}
        return _windows({"sliding_window": self.default, **config}, [True] * config["num_hidden_layers"])

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        """Add the window."""
        config["sliding_window"] = window_sizes(model)[0]
        if self.switch:
            config[self.switch] = config["sliding_window"] is not None


@dataclass(frozen=True, slots=True)
class RepeatedWindows:
    """All layers but every n-th have a window, unless `layer_types` lists them.

    Args:
        every: n, or the name of an entry with it and its default.
        tokens: the window if the entry is absent.
    """

    every: int | tuple[str, int]
    tokens: int = 4096

    def slides(self, config: Mapping[str, Any]) -> list[bool]:
        """Return whether each layer has a window."""
        if (kinds := _kinds(config)) is not None:
            return [kind == SLIDING for kind in kinds]
        every = self.every
        if isinstance(every, tuple):
            every = whole_number(config.get(every[0]) or every[1], every[0])
        return [(index + 1) % every != 0 for index in range(config["num_hidden_layers"])]

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the window of each layer that has one."""
        return _windows({"sliding_window": self.tokens, **config}, self.slides(config))

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        """Add the window and the type of each layer."""
        tokens = window_sizes(model)
        # The classes require a number, even if no layer uses it.
        config["sliding_window"] = next((each for each in tokens if each is not None), self.tokens)
        config["layer_types"] = [FULL if each is None else SLIDING for each in tokens]


def _last_layers(config: Mapping[str, Any]) -> list[bool]:
    first = number(config.get("max_window_layers", 28), "max_window_layers")
    return [index >= first for index in range(config["num_hidden_layers"])]


@dataclass(frozen=True, slots=True)
class ChosenWindows:
    """Some layers have a window.

    Args:
        default: the window if the entry is absent; None: there is none.
        slides: whether each layer has a window if `layer_types` does not list them.
    """

    default: int | None = 4096
    slides: Callable[[Mapping[str, Any]], list[bool]] = _last_layers

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the window of each layer that has one."""
        kinds = _kinds(config)
        if not config.get("use_sliding_window"):
            if SLIDING in (kinds or ()):
                raise ConversionError(
                    f"config.json has layer_types with {SLIDING}, but not use_sliding_window: true; correct "
                    "one of the two, or copy the folder again"
                )
            return {}
        slides = self.slides(config) if kinds is None else [kind == SLIDING for kind in kinds]
        return _windows({"sliding_window": self.default, **config}, slides)

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        """Add the window and the type of each layer."""
        tokens = window_sizes(model)
        sizes = [each for each in tokens if each is not None]
        config["use_sliding_window"] = bool(sizes)
        config["sliding_window"] = sizes[0] if sizes else None
        config["layer_types"] = [FULL if each is None else SLIDING for each in tokens]
        with_window = [index for index, each in enumerate(tokens) if each is not None]
        config["max_window_layers"] = with_window[0] if with_window else len(tokens)

"""Entries of rotary embeddings: `rope_parameters`, and what earlier versions of transformers wrote."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from neox_config.facts.rotary import longrope_attention_factor, yarn_attention_factor
from neox_config.spec.values import ABSENT, Each
from neox_model.convert.errors import ConversionError
from neox_model.convert.families.values import first, in_layers, number, truth, whole_number
from neox_model.convert.families.windows import FULL, SLIDING, RepeatedWindows, window_sizes

__all__ = ["RotaryBase", "RotaryByType", "RotaryFraction", "RotaryScaling"]

_DEFAULT_BASE = 10000.0
_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
_BY_LENGTH = ("llama3", "yarn", "longrope")
_LENGTH = "original_max_position_embeddings"
_BASE, _FRACTION, _SCALING = (f"layers.mixer.position.{name}" for name in ("base", "fraction", "scaling"))


def _block(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the block; transformers prefers the older name."""
    found = _mapping(config.get("rope_scaling") or config.get("rope_parameters"))
    if any(isinstance(value, Mapping) for value in found.values()):
        raise ConversionError(
            "config.json has rope_parameters by type of layer, but neox-model has one for all layers; only "
            "models with one can be converted"
        )
    return found


def _mapping(found: Any) -> Mapping[str, Any]:
    if not isinstance(found or {}, Mapping):
        raise ConversionError(
            f"config.json has rope_parameters: {found!r}, which is not a block; copy it again"
        )
    return found or {}


@dataclass(frozen=True, slots=True)
class RotaryBase:
    """The base of the frequencies.

    Args:
        older: name outside the block that earlier versions read; written too.
        default: the base if there is none.
    """

    older: str = "rope_theta"
    default: float = _DEFAULT_BASE

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the base."""
        base = number(
            _block(config).get("rope_theta") or config.get(self.older) or self.default, "rope_theta"
        )
        if base != int(base):
            raise ConversionError(
                f"config.json has rope_theta: {base}, but rotary-emb-base of neox-model is a whole number"
            )
        return {_BASE: base}

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        """Add the base to the block, and under the older name."""
        block = config.setdefault("rope_parameters", {"rope_type": "default"})
        block["rope_theta"] = config[self.older] = float(first(model, _BASE))


@dataclass(frozen=True, slots=True)
class RotaryFraction:
    """The fraction of a head's channels that is rotated.

    Args:
        older: name outside the block that earlier versions read; written too.
        default: the fraction if there is none.
    """

    older: str
    default: float

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fraction."""
        inside, outside = _block(config).get("partial_rotary_factor"), config.get(self.older)
        found = next((each for each in (inside, outside) if each is not None), self.default)
        return {_FRACTION: number(found, "partial_rotary_factor")}

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        """Add the fraction to the block, and under the older name."""
        block = config.setdefault("rope_parameters", {"rope_type": "default"})
        block["partial_rotary_factor"] = config[self.older] = first(model, _FRACTION)


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """The formula that scales frequencies, and its settings.

    Args:
        types: formulas of the class; others are not written.
        words: older names of formulas -> today's.
        length: the original length, outside the block, if there is none; None: it is in the block.
    """

    types: tuple[str, ...] = _TYPES
    words: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return our settings, in the order of `rotary_scaling`; none without scaling."""
        block = _block(config)
        kind = block.get("rope_type") or block.get("type")
        block = {**block, "rope_type": self.words.get(str(kind), kind)}
        return {_SCALING: _scaling(block, {_LENGTH: self.length, **config})}

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        """Add the settings, also under the name that earlier versions read."""
        settings = _entries_of(first(model, _SCALING))
        if settings["rope_type"] != "default" and settings["rope_type"] in self.types:
            config["rope_scaling"] = config.setdefault("rope_parameters", {}) | settings
            config["rope_parameters"] = config["rope_scaling"]
            if self.length is not None:
                config[_LENGTH] = settings[_LENGTH]


def _entries_of(scaling: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Return the entries of a block, given our settings."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in scaling}
    return {"rope_type": plain.pop("type", "default"), **plain}


def _scaling(block: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return our settings of a block; none without scaling."""
    kind = block.get("rope_type") or block.get("type") or "default"
    if kind not in _TYPES:
        raise ConversionError(
            f"config.json has rope_type: {kind!r}, which neox-model does not have; it has {', '.join(_TYPES)}"
        )
    if kind == "default":
        return ()
    values: dict[str, Any] = {"type": kind}
    if kind != "longrope":
        values["factor"] = number(block.get("factor"), "factor")
    if kind in _BY_LENGTH:
        length = config.get(_LENGTH) or block.get(_LENGTH) or config["max_position_embeddings"]
        values[_LENGTH] = whole_number(length, _LENGTH)
    if kind == "llama3":
        values |= {name: number(block.get(name), name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        values |= {
            "beta_fast": number(block.get("beta_fast") or 32, "beta_fast"),
            "beta_slow": number(block.get("beta_slow") or 1, "beta_slow"),
            "truncate": truth(block.get("truncate", True), "truncate"),
            "attention_factor": _attention_factor(block),
        }
    if kind == "longrope":
        values["attention_factor"] = _longrope_factor(block, values[_LENGTH], config)
        values |= {name: _numbers(block.get(name), name) for name in ("short_factor", "long_factor")}
    return tuple(values.items())


@dataclass(frozen=True, slots=True)
class RotaryByType:
    """Bases and scalings, one of layers without a window and one of layers with it.

    Args:
        windows: which layers have one.
        full: the base of layers without a window if there is none.
        sliding: that of layers with one.
        older_sliding: older name of the base of layers with a window; None: it had no name.
    """

    windows: RepeatedWindows
    full: float
    sliding: float
    older_sliding: str | None = None

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return base and scaling of each layer."""
        blocks, scaling = (_mapping(config.get(name)) for name in ("rope_parameters", "rope_scaling"))
        if "type" in scaling and "rope_type" not in scaling:
            raise ConversionError(
                f"config.json has rope_scaling with type: {scaling['type']!r}, which only some versions of "
                "transformers read; rename it to rope_type, or remove rope_scaling"
            )
        full = {**_mapping(blocks.get(FULL)), **scaling}
        sliding = dict(_mapping(blocks.get(SLIDING)))
        full.setdefault("rope_theta", config.get("rope_theta") or self.full)
        sliding.setdefault("rope_theta", config.get(self.older_sliding or "") or self.sliding)
        of_layers = [sliding if each else full for each in self.windows.slides(config)]
        return {
            _BASE: Each(tuple(number(each["rope_theta"], "rope_theta") for each in of_layers)),
            _SCALING: Each(tuple(_scaling(each, {**config, _LENGTH: None}) for each in of_layers)),
        }

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        """Add a block for each type of layer, and what earlier versions read."""
        blocks: dict[str, Any] = {
            FULL: {"rope_type": "default", "rope_theta": self.full},
            SLIDING: {"rope_type": "default", "rope_theta": self.sliding},
        }
        of_layers = (window_sizes(model), in_layers(model, _BASE), in_layers(model, _SCALING))
        for window, base, scaling in zip(*of_layers, strict=True):
            kind = FULL if window is None else SLIDING
            if base is not ABSENT:  # The layer is rotated.
                blocks[kind] = {"rope_theta": base, **_entries_of(scaling)}
        config["rope_parameters"] = blocks
        if blocks[FULL]["rope_type"] != "default":
            config["rope_scaling"] = blocks[FULL]
        config["rope_theta"] = blocks[FULL]["rope_theta"]
        if self.older_sliding is not None:
            config[self.older_sliding] = blocks[SLIDING]["rope_theta"]


def _attention_factor(block: Mapping[str, Any]) -> float:
    """Return the number that multiplies sines and cosines, as transformers determines it."""
    given, factor = block.get("attention_factor"), number(block.get("factor"), "factor")
    if given is not None:
        return number(given, "attention_factor")
    above, below = (number(block.get(name) or 0, name) for name in ("mscale", "mscale_all_dim"))
    if above and below:
        return yarn_attention_factor(factor, above) / yarn_attention_factor(factor, below)
    return yarn_attention_factor(factor)


def _longrope_factor(block: Mapping[str, Any], original: int, config: Mapping[str, Any]) -> float:
    """Return the number that multiplies sines and cosines, as transformers determines it."""
    if block.get("attention_factor") is not None:
        return number(block["attention_factor"], "attention_factor")
    longest: float = config["max_position_embeddings"]
    if block.get("factor") is not None:
        longest = number(block["factor"], "factor") * original
    return longrope_attention_factor(longest, original)


def _numbers(value: Any, name: str) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise ConversionError(
            f"config.json has {name}: {value!r}, which is not a list of numbers; copy it again"
        )
    return tuple(number(each, name) for each in value)

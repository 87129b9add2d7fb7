"""Position embeddings as plain frozen values: what each is, from the parameters and back.

A row of `POSITIONS` is all that neox_config must know about one, apart from its name in `pos_emb`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from neox_config.derive.objective import is_encoder
from neox_config.schema.config import NeoXConfig
from neox_config.spec.values import of

__all__ = [
    "POSITIONS",
    "AddedPosition",
    "Alibi",
    "AttentionPosition",
    "Learned",
    "Rotary",
    "Rpe",
    "Sinusoidal",
    "read_position",
    "settings_of_position",
]

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A vector per position, added to the embeddings.

    Args:
        count: number of positions.
        offset: rows of the table before that of the first position.
    """

    count: int = of("max_position_embeddings")
    offset: int = of("opt_pos_emb_offset", default=0)

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.offset + self.count

    @classmethod
    def read(cls, config: NeoXConfig, layer_index: int) -> Self:
        """Return the position embedding of a layer."""
        count, offset = config.model.max_position_embeddings, config.attention.opt_pos_emb_offset
        return cls(count=count, offset=offset)

    def settings(self) -> Settings:
        """Return the parameters that give it."""
        return {"opt-pos-emb-offset": self.offset} if self.offset else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sinusoidal:
    """Sines and cosines of the position, added to the embeddings."""

    @classmethod
    def read(cls, config: NeoXConfig, layer_index: int) -> Self:
        """Return the position embedding of a layer."""
        return cls()

    def settings(self) -> Settings:
        """Return the parameters that give it."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotation of queries and keys by angles that grow with the position.

    Args:
        fraction: fraction of a head's channels that is rotated.
        base: base of the frequencies.
        scaling: settings of scaled frequencies that have an effect, in the order of `rotary_scaling`;
            empty: not scaled.
    """

    fraction: float = of("rotary_pct")
    base: float = of("rotary_emb_base")
    scaling: tuple[tuple[str, Any], ...] = of("rotary_scaling", default=())

    @classmethod
    def read(cls, config: NeoXConfig, layer_index: int) -> Self:
        """Return the position embedding of a layer."""
        attention = config.attention
        scaling = attention.rotary_scaling.in_use(config.model.max_position_embeddings)
        return cls(
            fraction=attention.rotary_pct, base=attention.rotary_emb_base, scaling=tuple(scaling.items())
        )

    def settings(self) -> Settings:
        """Return the parameters that give it."""
        base = int(self.base) if self.base == int(self.base) else self.base
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in self.scaling}
        return {
            "rotary-pct": self.fraction,
            "rotary-emb-base": base,
            **({"rotary-scaling": plain} if plain else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Alibi:
    """A bias on attention scores that falls with the distance.

    Args:
        times: number that multiplies it, which layer scaling makes the number of the layer.
    """

    times: int = of("apply_query_key_layer_scaling", default=1)

    @classmethod
    def read(cls, config: NeoXConfig, layer_index: int) -> Self:
        """Return the position embedding of a layer."""
        return cls(times=_times(config, layer_index))

    def settings(self) -> Settings:
        """Return the parameters that give it."""
        return _scaled(self.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rpe:
    """A learned bias on attention scores per head and bucket of distances.

    Args:
        buckets: number of buckets.
        max_distance: distances of this many tokens or more share the last bucket.
        both_ways: half of the buckets are for later tokens.
        times: as in `Alibi`.
    """

    buckets: int = of("rpe_num_buckets")
    max_distance: int = of("rpe_max_distance")
    both_ways: bool = of("rpe_causal")
    times: int = of("apply_query_key_layer_scaling", default=1)

    @classmethod
    def read(cls, config: NeoXConfig, layer_index: int) -> Self:
        """Return the position embedding of a layer."""
        attention = config.attention
        return cls(
            buckets=attention.rpe_num_buckets,
            max_distance=attention.rpe_max_distance,
            both_ways=is_encoder(config) and not attention.rpe_causal,
            times=_times(config, layer_index),
        )

    def settings(self) -> Settings:
        """Return the parameters that give it."""
        buckets = {"rpe-num-buckets": self.buckets, "rpe-max-distance": self.max_distance}
        return {**buckets, "rpe-causal": not self.both_ways, **_scaled(self.times)}


AddedPosition = Learned | Sinusoidal
"""Position embeddings that are added to those of tokens."""
AttentionPosition = Rotary | Rpe | Alibi
"""Position embeddings that attention uses in every layer."""

POSITIONS: Mapping[str, type[AddedPosition | AttentionPosition]] = {
    "learned": Learned,
    "sinusoidal": Sinusoidal,
    "rotary": Rotary,
    "rpe": Rpe,
    "alibi": Alibi,
}
"""Name in `pos_emb` -> class; there is no row for "none"."""


def read_position(config: NeoXConfig, layer_index: int = 0) -> AddedPosition | AttentionPosition | None:
    """Return the position embedding of a layer, or of the input; None if there is none."""
    kind = POSITIONS.get(config.attention.pos_emb)
    return None if kind is None else kind.read(config, layer_index)


def settings_of_position(position: AddedPosition | AttentionPosition | None) -> Settings:
    """Return `pos-emb` and the parameters that go with it."""
    if position is None:
        return {"pos-emb": "none"}
    name = next(name for name, kind in POSITIONS.items() if isinstance(position, kind))
    return {"pos-emb": name, **position.settings()}


def _times(config: NeoXConfig, layer_index: int) -> int:
    return max(1, layer_index) if config.attention.apply_query_key_layer_scaling else 1


def _scaled(times: int) -> Settings:
    return {"apply-query-key-layer-scaling": True} if times > 1 else {}

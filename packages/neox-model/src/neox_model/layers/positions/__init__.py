"""Position embeddings by name.

There are three interfaces. An input position is added to the embeddings: `position(positions_SB)`. A
query-key position rotates queries and keys: `position(query_SBNK, key_SBNK, start)`. A relative position is a
bias of attention scores by distance: `position(distance_R)`.
"""

from neox_model.layers.positions.learned import LearnedPosition
from neox_model.layers.positions.relative import AlibiPosition, BucketPosition
from neox_model.layers.positions.rotary import RotaryPosition, RotaryTables, lengths_of_requests
from neox_model.layers.positions.sinusoidal import SinusoidalPosition

__all__ = [
    "AlibiPosition",
    "BucketPosition",
    "LearnedPosition",
    "RotaryPosition",
    "RotaryTables",
    "SinusoidalPosition",
    "lengths_of_requests",
]

"""The arrangement of ranks on the axes (pipe, data, model), the last one fastest.

Tensor parallelism communicates most, so its ranks are neighbours on one host. DeepSpeed's grid
(`PipeModelDataParallelTopology`) has the same order. The data axis is divided once more, into
(copies, experts): neighbours on it divide the experts.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Axis", "Topology"]

Axis = Literal["pipe", "data", "copies", "experts", "model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sizes of the axes; the world has `pipe * data * model` ranks.

    Args:
        pipe: pipeline stages.
        data: copies of the model, of which `experts` share the experts.
        model: tensor-parallel ranks.
        experts: data-parallel ranks that divide the experts; a divisor of `data`.
    """

    pipe: int
    data: int
    model: int
    experts: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pipe * self.data * self.model

    def index_along(self, axis: Axis, rank: int) -> int:
        """Return the position of a rank on one axis, such as its data-parallel rank."""
        return rank // self._step(axis) % self._size(axis)

    def ranks_along(self, axis: Axis) -> list[tuple[int, ...]]:
        """Return every group of ranks that differ in one axis only."""
        step, size = self._step(axis), self._size(axis)
        firsts = (rank for rank in range(self.world_size) if self.index_along(axis, rank) == 0)
        return [tuple(range(first, first + step * size, step)) for first in firsts]

    def _step(self, axis: Axis) -> int:
        """Return the difference of neighbouring ranks on an axis."""
        steps: dict[Axis, int] = {
            "model": 1,
            "data": self.model,
            "experts": self.model,
            "copies": self.model * self.experts,
            "pipe": self.model * self.data,
        }
        return steps[axis]

    def _size(self, axis: Axis) -> int:
        sizes: dict[Axis, int] = {
            "model": self.model,
            "data": self.data,
            "experts": self.experts,
            "copies": self.data // self.experts,
            "pipe": self.pipe,
        }
        return sizes[axis]

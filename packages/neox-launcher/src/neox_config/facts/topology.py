"""The arrangement of ranks on the axes (pipe, data, model), the last one fastest.

Tensor parallelism communicates most, so its ranks are neighbours on one host. DeepSpeed's grid
(`PipeModelDataParallelTopology`) has the same order.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Axis", "Topology"]

Axis = Literal["pipe", "data", "model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sizes of the three axes; the world has `pipe * data * model` ranks."""

    pipe: int
    data: int
    model: int

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
        return {"model": 1, "data": self.model, "pipe": self.model * self.data}[axis]

    def _size(self, axis: Axis) -> int:
        return {"model": self.model, "data": self.data, "pipe": self.pipe}[axis]

"""Whether something can be used, and why not."""

from dataclasses import dataclass

__all__ = ["Availability"]


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a fused operator can be used, and why not (or by what means)."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok

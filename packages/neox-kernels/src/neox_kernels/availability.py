"""The result of checking whether a fused operator can be used."""

from dataclasses import dataclass

__all__ = ["Availability"]


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a fused operator can be used, and the reason (if it can: which build is used)."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok

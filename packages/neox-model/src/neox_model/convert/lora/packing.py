"""Where the adapters of PEFT lie in ours.

Ours has one A for query, key and value; PEFT, for a model that stores them apart, one for each. Their A are
stacked: the rank of ours is the sum of theirs, and B has each part's values in its own columns, and zeros
elsewhere. All matrices of a model have one rank, so that the others end with zeros. Factors stay the same,
because alpha grows like the rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from neox_config.schema.sections.adapters import AdaptersSection
from neox_model.checkpoint.errors import DamagedManifestError

__all__ = ["PEFT", "Packing"]

PEFT = "peft"
"""Entry of a manifest's configuration that records it, until the adapters are trained on."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The rank and alpha of PEFT's adapters, and the matrices that were stacked.

    Args:
        rank: of theirs.
        alpha: of theirs.
        stacked: name of a matrix, such as "qkv" -> the numbers of its parts that have an adapter, in the
            order of the stack.
    """

    rank: int
    alpha: float
    stacked: Mapping[str, tuple[int, ...]]

    @property
    def our_rank(self) -> int:
        """Return the rank of ours."""
        return self.rank * max((len(parts) for parts in self.stacked.values()), default=1)

    @property
    def our_alpha(self) -> float:
        """Return the alpha of ours."""
        return self.alpha * (self.our_rank // self.rank)

    def places(self, kind: str, parts: int) -> list[slice | None]:
        """Return rows of A, which are columns of B, of each part of a matrix; None: it has no adapter."""
        if kind not in self.stacked:
            return [slice(0, self.rank)] * parts
        first = {part: number * self.rank for number, part in enumerate(self.stacked[kind])}
        return [
            slice(first[part], first[part] + self.rank) if part in first else None for part in range(parts)
        ]

    def recorded(self) -> dict[str, Any]:
        """Return the entry of a manifest."""
        stacked = {kind: list(parts) for kind, parts in self.stacked.items()}
        return {"rank": self.rank, "alpha": self.alpha, "stacked": stacked}

    @staticmethod
    def of(section: AdaptersSection, recorded: Any) -> "Packing":
        """Return that of adapters of ours; without a record, they are stored as they are.

        Raises:
            DamagedManifestError: the record has another form, or is of other adapters.
        """
        if recorded is None:
            return Packing(section.lora_rank, section.lora_alpha, {})
        try:
            found = TypeAdapter(Packing).validate_python(recorded)
            if (found.our_rank, found.our_alpha) != (section.lora_rank, section.lora_alpha):
                raise ValueError("other adapters")
        except (ValueError, ArithmeticError) as error:
            raise DamagedManifestError(f"config / {PEFT} does not fit lora_rank and lora_alpha") from error
        return found

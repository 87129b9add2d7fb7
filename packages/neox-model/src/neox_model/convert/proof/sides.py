"""The two models of a proof."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from neox_data.tokenizers import Tokenizer
from neox_model.convert.families import Family
from neox_model.convert.reference import load_config
from neox_model.convert.stored import StoredWeights
from neox_model.convert.weights import WeightFiles

__all__ = ["Sides", "TokenizerSides", "dtype_of"]


@dataclass(frozen=True, slots=True)
class TokenizerSides:
    """Our tokenizer, and a folder of transformers with theirs.

    Args:
        tokenizer: our tokenizer.
        folder: their folder.
        rows: entries of the vocabulary.
        as_stored: compare with tokenizer.json as it is stored (True), or with what transformers loads
            (False); None: there is no choice.
    """

    tokenizer: Tokenizer
    folder: Path
    rows: int
    as_stored: bool | None = None


@dataclass(frozen=True, slots=True)
class Sides:
    """A checkpoint of ours and a folder of transformers.

    Args:
        weights: those of the checkpoint.
        folder: their side.
        family: the class of theirs.
        tokenizer: our tokenizer.
        rows: entries of the vocabulary that both have; ours may have more, which are padding.
        as_stored: as in `TokenizerSides`.
    """

    weights: StoredWeights
    folder: Path
    family: Family
    tokenizer: Tokenizer
    rows: int
    as_stored: bool | None = None
    _config: list[Any] = field(default_factory=list)

    @property
    def tokenizers(self) -> TokenizerSides:
        """Return the tokenizers of both sides."""
        return TokenizerSides(self.tokenizer, self.folder, self.rows, self.as_stored)

    @property
    def config(self) -> Any:
        """Return their configuration, as the class reads it."""
        if not self._config:
            self._config.append(load_config(self.folder, self.family))
        return self._config[0]


def dtype_of(sides: Sides, files: WeightFiles) -> torch.dtype:
    """Return the dtype that our weights are rounded to: that of all of theirs; float32 if theirs differ."""
    found = {stored.dtype for name, stored in files.tensors.items() if not sides.family.is_ignored(name)}
    return found.pop() if len(found) == 1 else torch.float32

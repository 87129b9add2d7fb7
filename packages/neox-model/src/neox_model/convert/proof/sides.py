"""The two models of a proof."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from neox_data.tokenizers import Tokenizer
from neox_model.convert.families import Family
from neox_model.convert.reference import load_config
from neox_model.convert.stored import StoredWeights
from neox_model.convert.weights import WeightFiles

__all__ = ["Sides", "dtype_of"]


@dataclass(frozen=True)
class Sides:
    """A checkpoint of ours and a folder of transformers.

    Args:
        weights: the checkpoint.
        folder: their side.
        family: the class of theirs.
        tokenizer: our tokenizer.
        rows: entries of the vocabulary that both have; ours may have more, which are padding.
        as_stored: compare with tokenizer.json as it is stored (True), or with what transformers loads
            (False); None: there is no choice.
    """

    weights: StoredWeights
    folder: Path
    family: Family
    tokenizer: Tokenizer
    rows: int
    as_stored: bool | None = None

    @cached_property
    def config(self) -> Any:
        """Return their configuration, as the class reads it."""
        return load_config(self.folder, self.family)


def dtype_of(sides: Sides, files: WeightFiles) -> torch.dtype:
    """Return the dtype that our weights are rounded to: that of all of theirs; float32 if theirs differ."""
    found = {stored.dtype for name, stored in files.tensors.items() if not sides.family.is_ignored(name)}
    return found.pop() if len(found) == 1 else torch.float32

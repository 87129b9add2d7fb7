"""Compare two folders, each a checkpoint of ours or a model of transformers."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox_config.pluralize import pluralize
from neox_data.amount_progress import tracked
from neox_model.convert.checkpoints import Checkpoint
from neox_model.convert.differences import differences
from neox_model.convert.errors import ConversionError
from neox_model.convert.families import family_of_config
from neox_model.convert.families.values import whole_number
from neox_model.convert.proof import Sides, prove
from neox_model.convert.proof.rounding import Roundings, compare_values
from neox_model.convert.reference import require_transformers
from neox_model.convert.requests import read_config
from neox_model.convert.tokenizer_files import rows_to_keep
from neox_model.convert.weights import open_weights
from neox_model.inspection.finding import find_checkpoint, is_model

__all__ = ["verify"]

logger = logging.getLogger(__name__)


class _Theirs:
    """A model of transformers, whose tensors are read as those of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, read_config(folder)
        self.family = family_of_config(self.config)
        self._files, self.model = open_weights(folder, self.family, self.family.read(self.config))
        stored = [name for name in self._files.tensors if not self.family.is_ignored(name)]
        # Today's names.
        whole = {self._files.whole_name(part) for part in self._files.parts}
        stored = [*(name for name in stored if name not in whole), *self._files.parts]
        self._names = {self.family.usual_name(name): name for name in stored}
        if len(self._names) < len(stored):
            again = sorted(set(stored) - set(self._names.values()))
            raise ConversionError(
                f"{folder} contains {', '.join(again)} a second time under another name; copy it again"
            )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors by name."""
        return {name: self._files.shape(stored) for name, stored in self._names.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's stored dtype."""
        return self._files.dtype(self._names[name])

    def row_chunks(self, name: str) -> Iterator[Tensor]:
        """Yield a tensor's rows, some at a time."""
        return self._files.row_chunks(self._names[name])


def verify(
    one: Path, other: Path, *, vocab_file: Path | None = None, merge_file: Path | None = None
) -> dict[str, Any]:
    """Compare two folders.

    A checkpoint and a model of transformers are compared like a conversion (see proof). Two of a kind are
    compared by their models and the values of their tensors. Tensors of different dtypes are equal if
    all values are, and equal after rounding if one of them is the other rounded to its dtype.

    Args:
        one: a checkpoint, a folder of checkpoints (which means the latest), or a model of transformers.
        other: likewise.
        vocab_file: the tokenizer's file, if it is not where a checkpoint records it.
        merge_file: its second file.

    Returns:
        The result, with its `verdict`, and `differences` and `rounded` of two of a kind.

    Raises:
        ProofError: a checkpoint and a model of transformers differ.
        NeoXError: a folder is damaged, or contains no model.
    """
    first, second = (
        _Theirs(folder) if is_model(folder) else Checkpoint(find_checkpoint(folder))
        for folder in (one, other)
    )
    if isinstance(first, Checkpoint) and isinstance(second, _Theirs):
        return _prove(first, second, vocab_file=vocab_file, merge_file=merge_file)
    if isinstance(first, _Theirs) and isinstance(second, Checkpoint):
        return _prove(second, first, vocab_file=vocab_file, merge_file=merge_file)
    roundings = Roundings(("A", "B"))
    found = [
        *differences(first.model, second.model),
        *_compare_tensors(first, second, roundings),
    ]
    rounded = roundings.described()
    return {
        "verdict": "different" if found else "equal after rounding" if rounded else "equal",
        "differences": found,
        "rounded": rounded,
        "tensors": len(first.shapes),
    }


def _prove(
    ours: Checkpoint, theirs: _Theirs, *, vocab_file: Path | None, merge_file: Path | None
) -> dict[str, Any]:
    require_transformers("neox-convert verify")
    tokenizer = ours.tokenizer(vocab_file=vocab_file, merge_file=merge_file)
    ours.check_shapes()
    rows = whole_number(theirs.config.get("vocab_size", ours.vocab_size), "vocab_size")
    rows_to_keep(tokenizer, rows, trim_vocab=False)
    sides = Sides(ours, theirs.folder, theirs.family, tokenizer, rows=rows)
    return prove(sides, ours.model, ours.resolved.run, source=ours.folder, output=theirs.folder)


def _compare_tensors(
    one: Checkpoint | _Theirs, other: Checkpoint | _Theirs, roundings: Roundings
) -> Iterator[str]:
    """Yield how the tensors of two folders of a kind differ, and count those that are rounded."""
    names = sorted(one.shapes.keys() | other.shapes.keys())
    logger.info("comparing %s", pluralize(len(names), "tensor"))
    with tracked(names, len(names), "tensors compared") as each:
        for name in each:
            if name not in one.shapes or name not in other.shapes:
                yield f"{name} is only in {'A' if name in one.shapes else 'B'}"
            elif one.shapes[name] != other.shapes[name]:
                yield f"{name} has the shape {one.shapes[name]} in A and {other.shapes[name]} in B"
            else:
                pairs = zip(one.row_chunks(name), other.row_chunks(name), strict=True)
                found = compare_values(pairs, (one.dtype(name), other.dtype(name)))
                roundings.add(found)
                if not found.is_same:
                    yield (
                        f"{name}: {pluralize(found.apart, 'value differs', 'values differ')}, by at most "
                        f"{found.largest:.3g}{found.why(('A', 'B'))}"
                    )

"""Indexes of blocks: the place of each block of the texts, and its embedding, in memory-mapped arrays.

An index is a folder:

    index.json       what the embeddings were computed with
    places.npy       int64 [4, blocks]: number of the dataset, sequence, first token, number of tokens
    embeddings.npy   float32 [blocks, width]

It is made in the folder NAME.partial. Embeddings are computed in parts, by any number of processes, and each
part is a file that is written aside; what is there need not be computed again. At the end the folder is
renamed, and its parts are deleted.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neox_data.errors import DataError
from neox_data.pluralize import pluralize
from neox_data.whole_files import written_aside

__all__ = [
    "DESCRIPTION",
    "BlockIndex",
    "IndexInProgress",
    "Place",
    "begin_index",
    "open_block_index",
]

FORMAT = "neox-block-index-2"

# Number of the dataset, sequence, first token.
Place = tuple[int, int, int]

DESCRIPTION = "index.json"
_PLACES, _EMBEDDINGS = "places.npy", "embeddings.npy"
_PARTS = "parts"


@dataclass(frozen=True, slots=True, eq=False)
class BlockIndex:
    """A complete index; its arrays are read from the disk as they are used.

    Attributes:
        folder: the folder.
        made_with: what the embeddings were computed with, by name.
        places: number of the dataset, sequence, first token and number of tokens of each block.
        embeddings: the embedding of each block.
    """

    folder: Path
    made_with: Mapping[str, Any]
    places: np.ndarray
    embeddings: np.ndarray

    def __len__(self) -> int:
        return len(self.embeddings)

    def row_of(self, place: Place) -> int:
        """Return the number of the block at a place.

        Raises:
            DataError: there is no such block.
        """
        first, stop = 0, len(self)
        for column, value in zip(self.places, place, strict=False):
            found = np.searchsorted(column[first:stop], [value, value + 1])
            first, stop = (first + int(each) for each in found)
        if stop != first + 1:
            raise DataError(
                f"{self.folder} has no block at token {place[2]:,} of document {place[1]:,}; make the index "
                "again from these texts, with neox-launch index-blocks",
                code="no-block",
            )
        return first

    def check(self, made_with: Mapping[str, Any]) -> None:
        """Raise DataError if the embeddings were computed with something else."""
        if (found := _difference(self.made_with, made_with)) is not None:
            raise DataError(
                f"{self.folder} is an index of another model or of other texts: {found}; make another one "
                "with neox-launch index-blocks, in another folder (block-data-path)",
                code="other-index",
            )


def open_block_index(folder: Path) -> BlockIndex:
    """Open a complete index.

    Raises:
        DataError: there is none, or it is damaged.
    """
    if not (folder / DESCRIPTION).is_file():
        raise DataError(
            f"{folder} contains no index of blocks; make one with neox-launch index-blocks", code="no-index"
        )
    try:
        made_with = _described(folder / DESCRIPTION)["made_with"]
        places = np.load(folder / _PLACES, mmap_mode="r", allow_pickle=False)
        embeddings = np.load(folder / _EMBEDDINGS, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the index {folder} is damaged ({error}); delete it, and make it again", code="damaged-index"
        ) from error
    if places.ndim != 2 or embeddings.ndim != 2 or places.shape != (4, len(embeddings)):
        raise DataError(
            f"the index {folder} is damaged: it has places {places.shape} and embeddings "
            f"{embeddings.shape}; delete it, and make it again"
        )
    return BlockIndex(folder, made_with, places, embeddings)


def begin_index(folder: Path, made_with: Mapping[str, Any], *, part_blocks: int) -> None:
    """Create the folder of an index in progress, or check that the one that is there can be continued.

    Args:
        folder: folder of the complete index.
        made_with: what the embeddings are computed with, by name: text, numbers and lists of them.
        part_blocks: blocks of a part, for a new index.

    Raises:
        DataError: there is an index of something else, complete or not.
        OSError: the folder cannot be written.
    """
    partial = _partial(folder)
    if not (partial / DESCRIPTION).is_file():
        (partial / _PARTS).mkdir(parents=True, exist_ok=True)
        _describe(partial / DESCRIPTION, made_with=made_with, part_blocks=part_blocks)
    found = _difference(_described(partial / DESCRIPTION)["made_with"], made_with)
    if found is not None:
        raise DataError(
            f"{partial} is an incomplete index of another model or of other texts: {found}; delete it, or "
            "use another block-data-path",
            code="other-index",
        )


class IndexInProgress:
    """An index whose embeddings are being computed, by any number of processes.

    Args:
        folder: folder of the complete index.
        num_blocks: number of blocks.

    Raises:
        DataError: it was not begun here, such as on a disk that is not shared.
    """

    def __init__(self, folder: Path, num_blocks: int) -> None:
        self._folder, self._num_blocks = folder, num_blocks
        description = _partial(folder) / DESCRIPTION
        if not description.is_file():
            raise DataError(
                f"{_partial(folder)} does not exist on this host; block-data-path must be on a disk that all "
                "hosts share",
                code="not-on-this-host",
            )
        size = int(_described(description)["part_blocks"])
        self.parts = [range(first, min(first + size, num_blocks)) for first in range(0, num_blocks, size)]

    def missing(self) -> list[range]:
        """Return the blocks of each part whose embeddings are not there yet."""
        return [part for part in self.parts if not self._file(part).is_file()]

    def write(self, part: range, embeddings: np.ndarray) -> None:
        """Write the embeddings of a part.

        Raises:
            DataError: another process is writing it.
            OSError: it cannot be written.
        """
        with written_aside(self._file(part)) as file:
            np.save(file, embeddings.astype(np.float32), allow_pickle=False)

    def complete(self, places: np.ndarray) -> None:
        """Make the index of all parts, and give it its name.

        Raises:
            DataError: a part is missing or damaged.
            OSError: the disk is full, or a file cannot be written.
        """
        partial = _partial(self._folder)
        with written_aside(partial / _PLACES) as file:
            np.save(file, places.astype(np.int64), allow_pickle=False)
        width = self._read(self.parts[0]).shape[1]
        with written_aside(partial / _EMBEDDINGS) as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (self._num_blocks, width)}
            np.lib.format.write_array_header_1_0(file, header)
            for part in self.parts:
                file.write(self._read(part, width).tobytes())
        os.rename(partial, self._folder)
        shutil.rmtree(self._folder / _PARTS)

    def _read(self, part: range, width: int | None = None) -> np.ndarray:
        path = self._file(part)
        try:
            found: np.ndarray = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} is missing or damaged ({error}); delete it, and make the index again",
                code="missing-part",
            ) from error
        if found.shape != (len(part), width or found.shape[-1]):
            raise DataError(
                f"{path} has embeddings {found.shape} for {pluralize(len(part), 'block')}; delete it, and "
                "make the index again"
            )
        return found

    def _file(self, part: range) -> Path:
        return _partial(self._folder) / _PARTS / f"{part.start:012}.npy"


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def _describe(path: Path, **values: Any) -> None:
    with written_aside(path) as file:
        file.write(json.dumps({"format": FORMAT, **values}, indent=1, allow_nan=False).encode())


def _described(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']!r}")
        if not isinstance(found["made_with"], dict) or found.get("part_blocks", 1) < 1:
            raise ValueError("made_with or part_blocks has another form")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({error}); delete its folder, and make the index again",
            code="damaged-description",
        ) from error
    return found


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Return the first difference in words; None if both are the same."""
    wanted = json.loads(json.dumps(wanted, allow_nan=False))
    names = dict.fromkeys([*wanted, *found])
    return next(
        (
            f"{name} is {found.get(name)}, not {wanted.get(name)}"
            for name in names
            if found.get(name) != wanted.get(name)
        ),
        None,
    )

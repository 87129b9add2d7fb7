"""The sample index on disk: built once, found again by name, held against the data before use.

Three `.npy` files lie beside the data, under the names that GPT-NeoX gives them, so each program finds the
other's. Where that folder cannot be written they go to a cache folder. Several processes may ask at once: one
builds, holding a lock that dies with it, the others wait and load.
"""

import hashlib
import logging
import os
import stat
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np

from neox_data.errors import DataError
from neox_data.samples.build_index import (
    SampleIndex,
    build_sample_index,
    num_epochs,
    num_samples_in,
    sample_dtype,
    shuffle_dtype,
)
from neox_data.samples.native_index import best_builder
from neox_data.whole_files import exclusive_lock, written_aside

__all__ = ["FILE_NAMES", "IndexFiles", "default_cache_dir", "load_or_build"]

logger = logging.getLogger(__name__)

# The parts of a SampleIndex, and what their files are called.
FILE_NAMES = {"documents": "doc_idx", "starts": "sample_idx", "shuffle": "shuffle_idx"}

# Rows of a cached index that are followed through the data before it is used.
_NUM_CHECKED_ROWS = 64


@dataclass(frozen=True, slots=True)
class IndexFiles:
    """Where the three files of one sample index lie in one folder."""

    folder: Path
    stem: str

    @classmethod
    def beside(cls, prefix: Path, *, name: str, num_samples: int, seq_length: int, seed: int) -> Self:
        """The files beside the dataset `prefix`; the name holds every input of the order."""
        stem = f"{prefix.name}_{name}_indexmap_{num_samples}ns_{seq_length}sl_{seed}s_packedpi_ac"
        return cls(prefix.absolute().parent, stem)

    def within(self, folder: Path) -> "IndexFiles":
        """The files in a cache folder that datasets of different places share."""
        place = hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:16]
        return IndexFiles(folder, f"{place}_{self.stem}")

    def path(self, part: str) -> Path:
        """The file of one part of the index; see `FILE_NAMES`."""
        return self.folder / f"{self.stem}_{FILE_NAMES[part]}.npy"

    @property
    def lock(self) -> Path:
        """The file that the process which builds holds locked."""
        return self.folder / f".{self.stem}.lock"

    def load(self) -> SampleIndex | None:
        """The index as mapped arrays; None when a file is missing or is no array."""
        try:
            parts = [
                np.asarray(np.load(self.path(field.name), mmap_mode="r", allow_pickle=False))
                for field in fields(SampleIndex)
            ]
        except FileNotFoundError:
            return None
        except (ValueError, EOFError, OSError) as error:
            logger.warning("%s*.npy cannot be read (%s) and is built again", self.folder / self.stem, error)
            return None
        return SampleIndex(*parts)

    def save(self, index: SampleIndex) -> None:
        """Write the three files, each complete or absent; the caller holds the lock."""
        paths = {field.name: self.path(field.name) for field in fields(SampleIndex)}
        # First remove all, so that files of two builds never stand together.
        for path in paths.values():
            path.unlink(missing_ok=True)
        for part, path in paths.items():
            with written_aside(path) as file:
                np.save(file, getattr(index, part), allow_pickle=False)


def default_cache_dir() -> Path:
    """Where sample indices go when the data's folder cannot be written."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neox-data"


def load_or_build(
    documents: np.ndarray,
    sizes: np.ndarray,
    *,
    prefix: Path,
    name: str,
    num_samples: int,
    seq_length: int,
    seed: int,
    cache_dir: Path | None = None,
) -> SampleIndex:
    """The sample index from its files, or built and stored.

    Args:
        documents: sequence numbers of this part of the data, in file order.
        sizes: tokens of every sequence of the dataset.
        prefix: the dataset; its folder is where the files are sought first.
        name: of this part of the data, as in `train` or `train_3`.
        num_samples: samples that will be asked for.
        seq_length: tokens that a sample predicts.
        seed: for both shuffles.
        cache_dir: used when the data's folder cannot be written; None: `default_cache_dir`.

    Raises:
        DataError: the documents hold no token, or the cache folder belongs to someone else.
    """
    beside = IndexFiles.beside(prefix, name=name, num_samples=num_samples, seq_length=seq_length, seed=seed)

    def load(files: IndexFiles) -> SampleIndex | None:
        index = files.load()
        if index is None:
            return None
        problem = _check_fits(index, documents, sizes, num_samples=num_samples, seq_length=seq_length)
        if problem:
            logger.warning(
                "%s*.npy does not fit the data (%s) and is built again", files.folder / files.stem, problem
            )
            return None
        return index

    def build() -> SampleIndex:
        return build_sample_index(
            documents,
            sizes,
            num_samples=num_samples,
            seq_length=seq_length,
            seed=seed,
            builder=best_builder(),
        )

    index = load(beside)
    if index is not None:
        return index
    files = beside if os.access(beside.folder, os.W_OK) else beside.within(_private_folder(cache_dir))
    if files is not beside and (index := load(files)) is not None:
        return index
    with exclusive_lock(files.lock, purpose=f"it builds the sample index {files.stem}"):
        index = load(files)
        if index is None:
            started = time.perf_counter()
            files.save(build())
            seconds = time.perf_counter() - started
            logger.info("built the sample index %s in %.1f s", files.folder / files.stem, seconds)
            index = load(files)
    if index is None:
        raise DataError(f"{files.folder / files.stem}*.npy changed while they were written; start again")
    return index


def _private_folder(cache_dir: Path | None) -> Path:
    """The cache folder, made if needed; nothing is loaded from one that others could have filled."""
    folder = cache_dir or default_cache_dir()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise DataError(
            f"the cache folder {folder} is open to other users, so its files cannot be trusted; "
            f"make it yours alone (chmod 700) or name another"
        )
    return folder


def _check_fits(
    index: SampleIndex, documents: np.ndarray, sizes: np.ndarray, *, num_samples: int, seq_length: int
) -> str | None:
    """Why a cached index cannot be the one of this data, or None.

    Shapes are compared whole; of the content, evenly spread samples are followed through the documents, which
    must be `seq_length` tokens apart. That finds files of other data without a pass over all of it.
    """
    tokens_per_epoch = int(sizes[documents].sum(dtype=np.int64))
    epochs = num_epochs(tokens_per_epoch, num_samples=num_samples, seq_length=seq_length)
    num_documents = epochs * len(documents)
    count = num_samples_in(epochs * tokens_per_epoch, seq_length=seq_length)
    expected = (
        ("doc_idx", index.documents, (num_documents,), (np.dtype(np.int32),)),
        ("sample_idx", index.starts, (count + 1, 2), (sample_dtype(num_documents), np.dtype(np.int64))),
        ("shuffle_idx", index.shuffle, (count,), (shuffle_dtype(count), np.dtype(np.int64))),
    )
    for name, array, shape, dtypes in expected:
        if array.shape != shape or array.dtype not in dtypes:
            return f"{name} is {array.dtype} {array.shape}, and {dtypes[0]} {shape} is needed"
    rows = np.linspace(0, count, num=min(count, _NUM_CHECKED_ROWS) + 1, dtype=np.int64)
    if len(rows) > 1 and (index.shuffle[rows[:-1]] >= count).any():
        return "shuffle_idx names samples that do not exist"
    return _check_rows(index, rows, documents, sizes, seq_length)


def _check_rows(
    index: SampleIndex, rows: np.ndarray, documents: np.ndarray, sizes: np.ndarray, seq_length: int
) -> str | None:
    first, last = int(documents.min()), int(documents.max())
    for row in rows[:-1].tolist():
        (start, offset), (stop, end) = index.starts[row].tolist(), index.starts[row + 1].tolist()
        if not 0 <= start <= stop < len(index.documents):
            return f"sample {row} of sample_idx lies outside of doc_idx"
        crossed = index.documents[start : stop + 1]
        if crossed.min() < first or crossed.max() > last:
            return f"sample {row} is made of documents that are not of this part of the data"
        lengths = sizes[crossed]
        if not (0 <= offset <= lengths[0] and 0 <= end < lengths[-1]):
            return f"sample {row} begins or ends outside of its document"
        if int(lengths[:-1].sum(dtype=np.int64)) - offset + end != seq_length:
            return f"sample {row} does not have {seq_length} tokens"
    return None

"""Sample index files: built once, found by name, checked against the data before use.

Three `.npy` files are stored in the folder of the data, under the names that GPT-NeoX uses, so that each
program finds the other's. If that folder is not writable, they are stored in a cache folder. If several
processes need the index, one builds it under a lock, which is released when it ends; the others wait.
"""

import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from tokenize import TokenError
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
from neox_data.whole_files import exclusive_lock, sha256_of_file, written_aside

__all__ = ["FILE_NAMES", "IndexFiles", "default_cache_dir", "load_or_build", "load_or_build_whole"]

logger = logging.getLogger(__name__)

# Parts of a SampleIndex and the names of their files.
FILE_NAMES = {"documents": "doc_idx", "starts": "sample_idx", "shuffle": "shuffle_idx"}

# Key of `IndexFiles.inputs` in the file with the checksums.
_INPUTS = "inputs"

# What numpy raises for a damaged file, depending on the byte: its header is parsed as Python.
_DAMAGE = (ValueError, EOFError, OSError, SyntaxError, TokenError, TypeError, OverflowError, MemoryError)

# Number of rows of a cached index that are checked against the data.
_NUM_CHECKED_ROWS = 64


class _UnusableError(Exception):
    """The files of a sample index cannot be used; says why, after their name."""


@dataclass(frozen=True, slots=True)
class IndexFiles:
    """Paths of the three files of a sample index.

    Attributes:
        folder: their folder.
        stem: beginning of their names.
        inputs: hash of the inputs that the names do not contain; empty if there are none. Files without this
            hash are not used.
    """

    folder: Path
    stem: str
    inputs: str = ""

    @classmethod
    def beside(
        cls,
        prefix: Path,
        *,
        name: str,
        num_samples: int,
        seq_length: int,
        seed: int,
        pack_impl: str = "packed",
        allow_chopped: bool = True,
        inputs: str = "",
    ) -> Self:
        """Return the paths in the dataset's folder; the names are GPT-NeoX's."""
        order = f"{num_samples}ns_{seq_length}sl_{seed}s_{pack_impl}pi{'_ac' if allow_chopped else ''}"
        return cls(prefix.absolute().parent, f"{prefix.name}_{name}_indexmap_{order}", inputs)

    def within(self, folder: Path) -> "IndexFiles":
        """Return the paths in a cache folder, with a hash of the dataset's folder in the name."""
        place = hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:16]
        return replace(self, folder=folder, stem=f"{place}_{self.stem}")

    def path(self, part: str) -> Path:
        """Return the file of a part of the index; see `FILE_NAMES`."""
        return self.folder / f"{self.stem}_{FILE_NAMES[part]}.npy"

    @property
    def lock(self) -> Path:
        """Lock file of the process that builds the index."""
        return self.folder / f".{self.stem}.lock"

    @property
    def checksums(self) -> Path:
        """File with the SHA-256 of each of the three; files that another program wrote have none."""
        return self.folder / f"{self.stem}_sha256.json"

    def load(self) -> SampleIndex | None:
        """Return the index as mapped arrays; None if a file is missing.

        Raises:
            _UnusableError: a file is damaged or not an array, or the files were built for other inputs.
        """
        try:
            if self.inputs or self.checksums.exists():
                self._check_sums()
            parts = [
                np.asarray(np.load(self.path(field.name), mmap_mode="r", allow_pickle=False))
                for field in fields(SampleIndex)
            ]
        except FileNotFoundError:
            return None
        except _DAMAGE as error:
            raise _UnusableError(f"cannot be read ({error}); rebuilding it") from error
        return SampleIndex(*parts)

    def save(self, index: SampleIndex) -> None:
        """Write the files atomically, the checksums last; the caller must hold the lock."""
        paths = {field.name: self.path(field.name) for field in fields(SampleIndex)}
        # Remove all files first, so that files of two builds are never mixed.
        for path in (self.checksums, *paths.values()):
            path.unlink(missing_ok=True)
        for part, path in paths.items():
            with written_aside(path) as file:
                np.save(file, getattr(index, part), allow_pickle=False)
        with written_aside(self.checksums) as file:
            inputs = {_INPUTS: self.inputs} if self.inputs else {}
            file.write(json.dumps({**inputs, **self._sums()}, indent=1, allow_nan=False).encode() + b"\n")

    def _check_sums(self) -> None:
        recorded = json.loads(self.checksums.read_bytes())
        if self.inputs and (not isinstance(recorded, dict) or recorded.get(_INPUTS) != self.inputs):
            raise _UnusableError(
                "was built for another split, other documents or other labels; rebuilding it"
            )
        for name, found in self._sums().items():
            if not isinstance(recorded, dict) or recorded.get(name) != found:
                raise ValueError(f"{name} does not match {self.checksums.name}")

    def _sums(self) -> dict[str, str]:
        """Return the SHA-256 of each file, by its name."""
        paths = [self.path(part) for part in FILE_NAMES]
        with ThreadPoolExecutor(len(paths), "hash") as executor:
            return dict(zip([path.name for path in paths], executor.map(sha256_of_file, paths), strict=True))


def default_cache_dir() -> Path:
    """Return the folder of sample indices for data in folders that are not writable."""
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
    """Load the sample index from its files; build and store it if they are missing or do not match.

    Args:
        documents: sequence numbers of this part of the data, in file order.
        sizes: number of tokens of every sequence of the dataset.
        prefix: the dataset; its folder is searched first.
        name: name of this part of the data, such as `train` or `train_3`.
        num_samples: number of samples required.
        seq_length: number of predicted tokens per sample.
        seed: random seed of both shuffles.
        cache_dir: used if the data's folder is not writable; None: `default_cache_dir`.

    Raises:
        DataError: the documents contain no tokens, or other users can access the cache folder.
    """
    beside = IndexFiles.beside(prefix, name=name, num_samples=num_samples, seq_length=seq_length, seed=seed)

    def build() -> SampleIndex:
        return build_sample_index(
            documents,
            sizes,
            num_samples=num_samples,
            seq_length=seq_length,
            seed=seed,
            builder=best_builder(),
        )

    def check(index: SampleIndex) -> None:
        problem_for = partial(_check_fits, index, sizes=sizes, num_samples=num_samples, seq_length=seq_length)
        problem = problem_for(documents)
        if problem is None:
            return
        others = _documents_of(index, len(sizes))
        if others is not None and problem_for(others) is None:
            raise _UnusableError(
                f"was built for another split, with documents {_span(others)} in this part; "
                f"rebuilding it for documents {_span(documents)}"
            )
        raise _UnusableError(f"does not match the data ({problem}); rebuilding it")

    return _load_or_build(beside, build, check, cache_dir)


def load_or_build_whole(
    build: Callable[[], SampleIndex],
    *,
    prefix: Path,
    name: str,
    num_samples: int,
    seq_length: int,
    seed: int,
    pack_impl: str,
    allow_chopped: bool,
    inputs: str,
    cache_dir: Path | None = None,
) -> SampleIndex:
    """Load the index of samples of whole documents; build and store it if there is none for these inputs.

    Args:
        build: builds the index.
        prefix: the dataset; its folder is searched first.
        name: name of this part of the data, such as `train` or `train_3`.
        num_samples: number of samples required.
        seq_length: number of predicted tokens per sample.
        seed: random seed of all shuffles.
        pack_impl: how samples are made of documents.
        allow_chopped: whether long documents are chopped.
        inputs: hash of all other inputs of `build`.
        cache_dir: used if the data's folder is not writable; None: `default_cache_dir`.

    Raises:
        DataError: no document can be used, or other users can access the cache folder.
    """
    beside = IndexFiles.beside(
        prefix,
        name=name,
        num_samples=num_samples,
        seq_length=seq_length,
        seed=seed,
        pack_impl=pack_impl,
        allow_chopped=allow_chopped,
        inputs=inputs,
    )
    return _load_or_build(beside, build, lambda index: None, cache_dir)


def _documents_of(index: SampleIndex, num_documents: int) -> np.ndarray | None:
    """Return the consecutive documents that an index may be made of; None if some of them do not exist."""
    named = index.documents
    if named.ndim != 1 or named.dtype.kind != "i" or not len(named):
        return None
    first, last = int(named.min()), int(named.max())
    return np.arange(first, last + 1) if first >= 0 and last < num_documents else None


def _span(documents: np.ndarray) -> str:
    return f"{int(documents.min()):,} to {int(documents.max()):,}"


def _load_or_build(
    beside: IndexFiles,
    build: Callable[[], SampleIndex],
    check: Callable[[SampleIndex], None],
    cache_dir: Path | None,
) -> SampleIndex:
    """Return a stored index that passes the check; else one process builds and stores it, others wait."""
    reported = set()

    def load(files: IndexFiles) -> SampleIndex | None:
        try:
            index = files.load()
            if index is not None:
                check(index)
        except _UnusableError as error:
            # The files are read again under the lock, as another process may have built them meanwhile.
            problem = f"{files.folder / files.stem}*.npy {error}"
            if problem not in reported:
                logger.warning("%s", problem)
            reported.add(problem)
            return None
        return index

    index = load(beside)
    if index is not None:
        return index
    files = beside if os.access(beside.folder, os.W_OK) else beside.within(_private_folder(cache_dir))
    if files is not beside and (index := load(files)) is not None:
        return index
    with exclusive_lock(files.lock, purpose=f"building the sample index {files.stem}"):
        index = load(files)
        if index is None:
            started = time.perf_counter()
            files.save(build())
            seconds = time.perf_counter() - started
            logger.info("built the sample index %s in %.1f s", files.folder / files.stem, seconds)
            index = load(files)
    if index is None:
        raise DataError(f"{files.folder / files.stem}*.npy changed while being written; restart")
    return index


def _private_folder(cache_dir: Path | None) -> Path:
    """Return the cache folder, created if needed; refuse one that other users can access."""
    folder = cache_dir or default_cache_dir()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise DataError(
            f"the cache folder {folder} is accessible to other users, so its files cannot be trusted; "
            f"restrict it to you (chmod 700) or set another folder"
        )
    return folder


def _check_fits(
    index: SampleIndex, documents: np.ndarray, *, sizes: np.ndarray, num_samples: int, seq_length: int
) -> str | None:
    """Return why a cached index does not match this data, or None.

    Shapes and sums are compared, and evenly spaced samples are followed through the documents: they must be
    `seq_length` tokens apart. This detects files of other data, and most damage in files without checksums.
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
            return f"{name} is {array.dtype} {array.shape}, but {dtypes[0]} {shape} is required"
    if int(index.documents.sum(dtype=np.int64)) != epochs * int(documents.sum(dtype=np.int64)):
        return "doc_idx does not contain each document once per epoch"
    if count and (int(index.shuffle.max()) >= count or _wrapped_sum(index.shuffle) != _sum_below(count)):
        return "shuffle_idx does not contain each sample once"
    rows = np.linspace(0, count, num=min(count, _NUM_CHECKED_ROWS) + 1, dtype=np.int64)
    return _check_rows(index, rows, documents, sizes, seq_length)


def _wrapped_sum(numbers: np.ndarray) -> int:
    return int(numbers.sum(dtype=np.uint64))


def _sum_below(count: int) -> int:
    """Return the sum of 0 to `count` - 1, modulo 2**64."""
    return count * (count - 1) // 2 % 2**64


def _check_rows(
    index: SampleIndex, rows: np.ndarray, documents: np.ndarray, sizes: np.ndarray, seq_length: int
) -> str | None:
    first, last = int(documents.min()), int(documents.max())
    for row in rows[:-1].tolist():
        (start, offset), (stop, end) = index.starts[row].tolist(), index.starts[row + 1].tolist()
        if not 0 <= start <= stop < len(index.documents):
            return f"sample {row} of sample_idx is outside doc_idx"
        crossed = index.documents[start : stop + 1]
        if crossed.min() < first or crossed.max() > last:
            return f"sample {row} contains documents that are not in this part of the data"
        lengths = sizes[crossed]
        if not (0 <= offset <= lengths[0] and 0 <= end < lengths[-1]):
            return f"sample {row} starts or ends outside its document"
        if int(lengths[:-1].sum(dtype=np.int64)) - offset + end != seq_length:
            return f"sample {row} does not have {seq_length} tokens"
    return None

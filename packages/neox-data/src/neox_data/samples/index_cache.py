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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import Any, Self

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
from neox_data.samples.fingerprint import fingerprint
from neox_data.samples.native_index import best_builder
from neox_data.whole_files import exclusive_lock, sha256_of_file, written_aside

__all__ = ["FILE_NAMES", "IndexFiles", "Origin", "default_cache_dir", "load_or_build", "load_or_build_whole"]

logger = logging.getLogger(__name__)

# Parts of a SampleIndex and the names of their files.
FILE_NAMES = {"documents": "doc_idx", "starts": "sample_idx", "shuffle": "shuffle_idx"}

_RECORD = "_sha256.json"
# Keys of the record; the others are the names of the files.
_CONTENT, _STAMPS = "content", "read_from"

# States of files that a record remembers: more than one if hosts see different numbers for the same files.
_MOST_STAMPS = 16

# What numpy raises for a damaged file, depending on the byte: its header is parsed as Python.
_DAMAGE = (ValueError, EOFError, OSError, SyntaxError, TokenError, TypeError, OverflowError, MemoryError)


class _UnusableError(Exception):
    """The files of a sample index cannot be used; says why, after their name."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The data that an index is built from.

    Attributes:
        content: returns a hash of all that decides the index, except what the names of its files contain.
        stamp: the documents, and the state of the files with this content, which changes with each of them;
            empty if unknown.
    """

    content: Callable[[], str]
    stamp: str

    @classmethod
    def of(cls, documents: np.ndarray, arrays: Callable[[], Iterable[np.ndarray]], file_states: str) -> Self:
        """Return the origin of the index of some documents.

        Args:
            documents: sequence numbers of this part of the data.
            arrays: returns all else that decides the index.
            file_states: state of the files that these were read from; empty: unknown.
        """
        part = fingerprint((documents,))
        return cls(lambda: part + fingerprint(arrays()), file_states and f"{part} {file_states}")


@dataclass(frozen=True, slots=True)
class IndexFiles:
    """Paths of the three files of a sample index, and of the record of what they were built from.

    Attributes:
        folder: their folder.
        stem: beginning of their names.
        records: files with the hash of the content of the data, the states of its files that had this
            content, and the SHA-256 of each of the three. The first one that exists is read, and the first
            one written; files of another program have none.
    """

    folder: Path
    stem: str
    records: tuple[Path, ...]

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
    ) -> Self:
        """Return the paths in the dataset's folder; the names are GPT-NeoX's."""
        order = f"{num_samples}ns_{seq_length}sl_{seed}s_{pack_impl}pi{'_ac' if allow_chopped else ''}"
        folder, stem = prefix.absolute().parent, f"{prefix.name}_{name}_indexmap_{order}"
        return cls(folder, stem, (folder / f"{stem}{_RECORD}",))

    def within(self, folder: Path) -> "IndexFiles":
        """Return the paths in a cache folder, with a hash of the dataset's folder in the name."""
        stem = f"{self._place}_{self.stem}"
        return IndexFiles(folder, stem, (folder / f"{stem}{_RECORD}",))

    def recorded_in(self, folder: Path) -> "IndexFiles":
        """Return the same paths, with a record in a cache folder that is read and written first."""
        record = folder / f"{self._place}_{self.stem}_there{_RECORD}"
        return replace(self, records=(record, *self.records))

    @property
    def _place(self) -> str:
        return hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:16]

    def path(self, part: str) -> Path:
        """Return the file of a part of the index; see `FILE_NAMES`."""
        return self.folder / f"{self.stem}_{FILE_NAMES[part]}.npy"

    def recorded(self) -> dict[str, Any] | None:
        """Return the record; None if there is none.

        Raises:
            _UnusableError: it is damaged.
        """
        for path in self.records:
            try:
                record = json.loads(path.read_bytes())
                if not isinstance(record, dict) or not isinstance(record.get(_STAMPS, []), list):
                    raise ValueError("not their record")
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                raise _UnusableError(f"cannot be read ({path.name}: {error}); rebuilding it") from error
            return record
        return None

    def load(self) -> SampleIndex | None:
        """Return the index as mapped arrays; None if a file is missing.

        Raises:
            _UnusableError: a file is damaged, not an array, or not the one that is recorded.
        """
        record = self.recorded()
        try:
            if record is not None:
                for name, found in self._sums().items():
                    if record.get(name) != found:
                        raise ValueError(f"{name} does not match {self.records[0].name}")
            parts = [np.load(self.path(part), mmap_mode="r", allow_pickle=False) for part in FILE_NAMES]
        except FileNotFoundError:
            return None
        except _DAMAGE as error:
            raise _UnusableError(f"cannot be read ({error}); rebuilding it") from error
        return SampleIndex(*map(np.asarray, parts))

    def save(self, index: SampleIndex, content: str, stamp: str) -> None:
        """Write the files atomically, the record last; the caller must hold the lock."""
        paths = {part: self.path(part) for part in FILE_NAMES}
        # Remove all files first, so that files of two builds are never mixed.
        for path in (self.records[0], *paths.values()):
            path.unlink(missing_ok=True)
        for part, path in paths.items():
            with written_aside(path) as file:
                np.save(file, getattr(index, part), allow_pickle=False)
        self._record({**self._sums(), _CONTENT: content, _STAMPS: [stamp] if stamp else []})

    def remember(self, content: str, stamps: Iterable[str]) -> None:
        """Record the content of files that were checked, and the states of the files of the data.

        Without the record the index is as right, and is checked again the next time.
        """
        recorded = self.recorded()
        known = list(dict.fromkeys(stamp for stamp in stamps if stamp))[-_MOST_STAMPS:]
        record = {**(self._sums() if recorded is None else recorded), _CONTENT: content, _STAMPS: known}
        if record == recorded:
            return
        try:
            self._record(record)
        except OSError as error:
            logger.info("%s cannot be written (%s)", self.records[0], error)

    def _record(self, record: dict[str, Any]) -> None:
        with written_aside(self.records[0]) as file:
            file.write(json.dumps(record, indent=1, allow_nan=False).encode() + b"\n")

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
    stamp: str = "",
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
        stamp: state of the files that `sizes` were read from; empty: unknown, so that the sizes are hashed.
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

    def check(index: SampleIndex, is_of_other_data: bool) -> None:
        fault = _find_fault(index, documents, sizes=sizes, num_samples=num_samples, seq_length=seq_length)
        if fault is not None:
            raise _UnusableError(f"does not match the data ({fault}); rebuilding it")

    def arrays() -> Iterator[np.ndarray]:
        yield sizes[documents.min(initial=len(sizes)) : documents.max(initial=-1) + 1]

    origin = Origin.of(documents, arrays, stamp)
    return _load_or_build(beside, origin, build, check, cache_dir)


def load_or_build_whole(
    build: Callable[[], SampleIndex],
    origin: Origin,
    *,
    prefix: Path,
    name: str,
    num_samples: int,
    seq_length: int,
    seed: int,
    pack_impl: str,
    allow_chopped: bool,
    cache_dir: Path | None = None,
) -> SampleIndex:
    """Load the index of samples of whole documents; build and store it if there is none for this data.

    Args:
        build: builds the index.
        origin: the data.
        prefix: the dataset; its folder is searched first.
        name: name of this part of the data, such as `train` or `train_3`.
        num_samples: number of samples required.
        seq_length: number of predicted tokens per sample.
        seed: random seed of all shuffles.
        pack_impl: how samples are made of documents.
        allow_chopped: whether long documents are chopped.
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
    )

    def check(index: SampleIndex, is_of_other_data: bool) -> None:
        raise _UnusableError(
            "was built for another split, other documents or other labels; rebuilding it"
            if is_of_other_data
            else "does not record for which documents and labels it was built; rebuilding it"
        )

    return _load_or_build(beside, origin, build, check, cache_dir)


def _of_same_files(origin: Origin, places: Iterable[IndexFiles]) -> SampleIndex | None:
    """Return the first index that is recorded for the files of the data as they are."""
    for files in places:
        # What is wrong is said under the lock, where the files are read again.
        with suppress(_UnusableError):
            is_recorded = origin.stamp in (files.recorded() or {}).get(_STAMPS, [])
            if is_recorded and (index := files.load()) is not None:
                return index
    return None


def _of_content(
    content: str, origin: Origin, check: Callable[[SampleIndex, bool], None], places: Iterable[IndexFiles]
) -> SampleIndex | None:
    """Return the first index of this content, and record that; the caller must hold the lock.

    Args:
        content: hash of the content.
        origin: the data.
        check: raises `_UnusableError` unless an index is of the data; also receives whether it is recorded
            for other data.
        places: where indexes may be.
    """
    for files in places:
        try:
            index, recorded = files.load(), files.recorded() or {}
            if index is None:
                continue
            stamps = recorded.get(_STAMPS, [])
            if recorded.get(_CONTENT) != content:
                check(index, _CONTENT in recorded)
                logger.info("%s*.npy was checked and is the order of this data", files.folder / files.stem)
                stamps = []
            files.remember(content, [*stamps, origin.stamp])
        except _UnusableError as error:
            logger.warning("%s*.npy %s", files.folder / files.stem, error)
        else:
            return index
    return None


def _load_or_build(
    beside: IndexFiles,
    origin: Origin,
    build: Callable[[], SampleIndex],
    check: Callable[[SampleIndex, bool], None],
    cache_dir: Path | None,
) -> SampleIndex:
    """Return a stored index of this data; else one process builds and stores it, others wait.

    The content of the data is hashed only if the files of the data are not those of the record, by the
    process that holds the lock; the others then find these files in the record.
    """
    index = _of_same_files(origin, [beside])
    if index is not None:
        return index
    places = [beside]
    if not os.access(beside.folder, os.W_OK):
        cache = _private_folder(cache_dir)
        places = [beside.recorded_in(cache), beside.within(cache)]
    files = places[-1]
    with exclusive_lock(
        files.folder / f".{files.stem}.lock", purpose=f"building the sample index {files.stem}"
    ):
        index = _of_same_files(origin, places)
        if index is not None:
            return index
        content = origin.content()
        index = _of_content(content, origin, check, places)
        if index is None:
            started = time.perf_counter()
            files.save(build(), content, origin.stamp)
            seconds = time.perf_counter() - started
            logger.info("built the sample index %s in %.1f s", files.folder / files.stem, seconds)
            index = _of_content(content, origin, check, [files])
    if index is None:
        raise DataError(f"{files.folder / files.stem}*.npy changed while being written; restart")
    return index


def _private_folder(cache_dir: Path | None) -> Path:
    """Return the cache folder, created if needed; refuse one that other users can access."""
    folder = cache_dir or default_cache_dir()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be created ({error.strerror}), and the folder of the data "
            "cannot be written; set another folder",
            code="not-created",
        ) from error
    status = folder.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise DataError(
            f"the cache folder {folder} is accessible to other users, so its files cannot be trusted; "
            f"restrict it to you (chmod 700) or set another folder",
            code="open-to-others",
        )
    return folder


def _find_fault(
    index: SampleIndex, documents: np.ndarray, *, sizes: np.ndarray, num_samples: int, seq_length: int
) -> str | None:
    """Return why an index is not one of this data, or None: all but the two random orders is compared."""
    builder = best_builder()
    tokens_per_epoch = builder.count_tokens(np.asarray(documents, np.int32), sizes)
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
    if not np.isin([index.documents.min(), index.documents.max()], documents).all():
        return "doc_idx contains documents that are not in this part of the data"
    counts = partial(np.bincount, minlength=len(sizes))
    if not np.array_equal(counts(index.documents), epochs * counts(documents)):
        return "doc_idx does not contain each document once per epoch"
    if count and (index.shuffle.max() >= count or (np.bincount(index.shuffle, minlength=count) != 1).any()):
        return "shuffle_idx does not contain each sample once"
    starts = builder.sample_starts(index.documents, sizes, count, seq_length)
    different = np.flatnonzero((index.starts != starts).any(axis=1))
    if len(different):
        return f"sample_idx begins sample {different[0]:,} elsewhere than the sizes of the documents require"
    return None

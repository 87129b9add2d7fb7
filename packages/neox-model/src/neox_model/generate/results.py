"""Write the results of a generation as JSON lines; what was written before a failure is kept and named."""

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

from filelock import lock_descriptor

from neox_config.atomic import set_aside
from neox_config.errors import NeoXError
from neox_config.finite_json import dumps

__all__ = ["writing_results"]

logger = logging.getLogger(__name__)

Write = Callable[[Mapping[str, Any]], None]

# Some network file systems have no locks.
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def writing_results(path: Path | None) -> Iterator[Write]:
    """Provide a function that appends one result to `PATH.partial`, which is renamed when all are written.

    If the block fails or is stopped, the partial file remains. A partial file of an earlier generation is
    renamed to `PATH.1.partial` (or the next free number).

    Args:
        path: the file; an existing one is replaced at the end, unless there was no result. None: results are
            not written.

    Raises:
        NeoXError: the file cannot be written, or another generation writes it.
        OSError: the block raised it.
    """
    if path is None:
        yield lambda result: None
        return
    if path.exists() and not path.is_file():
        # A device would be replaced by a file of its name.
        kind = "a folder; add the name of a file" if path.is_dir() else "not a file; use standard output"
        raise NeoXError(f"cannot write the results to {path}: it is {kind}")
    partial, written = path.with_name(f"{path.name}.partial"), 0
    foreign: OSError | None = None
    try:
        # Renamed or removed while it is locked: afterwards it may be that of another generation.
        with _new_partial_file(path, partial) as file, _reported(partial, lambda: written):

            def write(result: Mapping[str, Any]) -> None:
                nonlocal written
                try:
                    file.write(dumps(result, ensure_ascii=False) + "\n")
                    file.flush()
                except OSError as error:
                    raise _not_writable(path, error) from error
                written += 1

            try:
                yield write
            except OSError as error:
                foreign = error
                raise
            if written:
                partial.rename(path)
            else:
                partial.unlink(missing_ok=True)
    except OSError as error:
        if error is foreign:
            raise
        raise _not_writable(path, error) from error
    if written:
        logger.info("wrote %s", path)
    else:
        kept = "keeps the results of an earlier generation" if path.exists() else "is not written"
        logger.warning("no text was generated; %s %s", path, kept)


def _not_writable(path: Path, error: OSError) -> NeoXError:
    return NeoXError(
        f"cannot write the results to {path}: {error}; set sample_output_file to another file",
        code="not-writable",
    )


def _new_partial_file(path: Path, partial: Path) -> TextIO:
    """Return the partial file, empty, and locked until it is closed; rename one of an earlier generation."""
    while True:
        with ExitStack() as stack:
            # NFS locks only files that are open for writing.
            file = stack.enter_context(partial.open("a", encoding="utf-8"))
            _lock(file, path)
            # Otherwise another generation renamed or removed it before it was locked.
            if _is_at(file, partial):
                if not os.fstat(file.fileno()).st_size:
                    stack.pop_all()
                    return file
                [kept] = set_aside([partial])
                logger.warning("the results of an earlier, unfinished generation are now in %s", kept)


def _is_at(file: IO[Any], path: Path) -> bool:
    """Return whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(file: IO[Any], path: Path) -> None:
    """Lock an open file until it is closed, so that another generation does not rename it meanwhile."""
    try:
        is_locked = lock_descriptor(file.fileno(), blocking=False)
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise
        is_locked = True
    if not is_locked:
        raise NeoXError(
            f"another generation writes its results to {path}; wait until it has ended, or set "
            "sample_output_file to another file",
            code="in-use",
        )


@contextmanager
def _reported(partial: Path, written: Callable[[], int]) -> Iterator[None]:
    """Name the partial file if the block fails or is stopped; without results, remove it."""
    try:
        yield
    except BaseException:
        count = written()
        if count:
            results = "1 result is" if count == 1 else f"{count:,} results are"
            logger.warning("the generation is not finished; %s in %s", results, partial)
        else:
            partial.unlink(missing_ok=True)
        raise

"""Write the results of a generation as JSON lines; what was written before a failure is kept and named."""

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
    """
    if path is None:
        yield lambda result: None
        return
    if path.exists() and not path.is_file():
        # A device would be replaced by a file of its name.
        kind = "a folder; add the name of a file" if path.is_dir() else "not a file; use standard output"
        raise NeoXError(f"cannot write the results to {path}: it is {kind}")
    partial, written = path.with_name(f"{path.name}.partial"), 0
    file = _new_partial_file(path, partial)
    try:
        with file:

            def write(result: Mapping[str, Any]) -> None:
                nonlocal written
                file.write(dumps(result, ensure_ascii=False) + "\n")
                file.flush()
                written += 1

            yield write
            if written:
                partial.rename(path)
            else:
                partial.unlink(missing_ok=True)
    except OSError as error:
        _report(partial, written)
        raise _unwritable(path, error) from error
    except BaseException:
        _report(partial, written)
        raise
    if written:
        logger.info("wrote %s", path)
    else:
        kept = "keeps the results of an earlier generation" if path.exists() else "is not written"
        logger.warning("no text was generated; %s %s", path, kept)


def _new_partial_file(path: Path, partial: Path) -> TextIO:
    """Create the partial file, locked until it is closed; rename one of an earlier generation."""
    try:
        with suppress(FileNotFoundError), partial.open("rb") as earlier:
            _lock(earlier, path)
            _keep_earlier(partial)
        file = partial.open("x", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error
    _lock(file, path)
    return file


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
            "sample_output_file to another file"
        )


def _keep_earlier(partial: Path) -> None:
    if not partial.stat().st_size:
        partial.unlink()
        return
    [kept] = set_aside([partial])
    logger.warning("the results of an earlier, unfinished generation are now in %s", kept)


def _unwritable(path: Path, error: OSError) -> NeoXError:
    return NeoXError(f"cannot write the results to {path}: {error}; set sample_output_file to another file")


def _report(partial: Path, written: int) -> None:
    if written:
        results = "1 result is" if written == 1 else f"{written:,} results are"
        logger.warning("the generation is not finished; %s in %s", results, partial)
    elif partial.exists():
        partial.unlink()

"""Write the results of a generation as JSON lines; what was written before a failure is kept and named."""

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from filelock import lock_descriptor

from neox_config.atomic import set_aside
from neox_config.errors import NeoXError
from neox_config.finite_json import dumps
from neox_config.pluralize import pluralize

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
        raise NeoXError(
            f"cannot write the results to {path}: it is not a file; set another sample_output_file"
        )
    partial, count = path.with_name(f"{path.name}.partial"), 0
    with _naming(path):
        file = _new_partial_file(path, partial)

    def write(result: Mapping[str, Any]) -> None:
        nonlocal count
        with _naming(path):
            file.write(dumps(result, ensure_ascii=False) + "\n")
            file.flush()
        count += 1

    # Renamed or removed while it is locked: afterwards it may be that of another generation.
    try:
        yield write
        with _naming(path):
            partial.rename(path) if count else partial.unlink(missing_ok=True)
    except BaseException:
        if count:
            results = pluralize(count, "result is", "results are")
            logger.warning("the generation is not finished; %s in %s", results, partial)
        else:
            partial.unlink(missing_ok=True)
        raise
    finally:
        with suppress(OSError):  # `write` has reported what cannot be written.
            file.close()
    if count:
        logger.info("wrote %s", path)
    else:
        kept = "keeps the results of an earlier generation" if path.exists() else "is not written"
        logger.warning("no text was generated; %s %s", path, kept)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file and the remedy if the block cannot write it."""
    try:
        yield
    except OSError as error:
        raise NeoXError(
            f"cannot write the results to {path}: {error}; set sample_output_file to another file",
            code="not-writable",
        ) from error


def _new_partial_file(path: Path, partial: Path) -> TextIO:
    """Return the partial file, empty, and locked until it is closed; rename one of an earlier generation."""
    while True:
        with ExitStack() as stack:
            # NFS locks only files that are open for writing.
            file = stack.enter_context(partial.open("a", encoding="utf-8"))
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
            # Otherwise another generation renamed or removed it before it was locked.
            if partial.exists() and os.path.samestat(os.fstat(file.fileno()), partial.stat()):
                if not partial.stat().st_size:
                    stack.pop_all()
                    return file
                [kept] = set_aside([partial])
                logger.warning("the results of an earlier, unfinished generation are now in %s", kept)

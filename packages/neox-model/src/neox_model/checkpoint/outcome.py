"""Make an operation succeed or fail on all ranks together."""

from collections.abc import Iterator
from contextlib import contextmanager

from neox_config.errors import NeoXError
from neox_model.checkpoint.errors import CheckpointError, FolderInUseError
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Group

__all__ = ["shared_outcome"]


@contextmanager
def shared_outcome(control: Group, action: str, *, keeps_bugs: bool = False) -> Iterator[None]:
    """Run a block on every rank; if it fails on one, raise the same error on all. Collective.

    The block must not communicate, because a rank that fails leaves it early.

    Args:
        control: CPU group of all ranks.
        action: what is being done, for the message.
        keeps_bugs: raise an exception that is neither a NeoXError nor an OSError as it is on its rank, so
            that it is reported with its traceback.

    Raises:
        FolderInUseError: another run holds a folder on the first failing rank.
        CheckpointError: the first failing rank's message and code, with its rank unless all ranks failed
            in this way.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # Sent to every rank and raised again below.
        failure = error
    code = getattr(failure, "code", "") if isinstance(failure, NeoXError) else ""
    failures = all_gather_object(
        control, None if failure is None else (_describe(failure), _kind_to_raise(failure), code)
    )
    if keeps_bugs and failure is not None and not isinstance(failure, NeoXError | OSError):
        raise failure
    failed = [(rank, *found) for rank, found in enumerate(failures) if found is not None]
    if failed:
        rank, message, kind, code = failed[0]
        is_everywhere = {each for _, each, *_ in failed} == {message} and len(failed) == control.size
        place = "" if is_everywhere else f" on rank {rank}"
        shared = kind(f"{action} failed{place}: {message}", code=code)
        shared.is_of_another_rank = rank != control.rank
        raise shared from failure


def _kind_to_raise(error: Exception) -> type[CheckpointError]:
    return FolderInUseError if isinstance(error, FolderInUseError) else CheckpointError


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, NeoXError | OSError) else f"{type(error).__name__}: {error}"

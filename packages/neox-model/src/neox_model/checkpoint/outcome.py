"""One rank's failure is everybody's: what ranks do together either succeeds or fails on all of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed

from neox_model.checkpoint.errors import CheckpointError
from neox_model.parallel.groups import Group

__all__ = ["collect", "gather", "shared_outcome"]


def gather(control: Group, item: Any) -> list[Any]:
    """Every rank's item, by rank; collective over the control group."""
    if control.size == 1:
        return [item]
    items: list[Any] = [None] * control.size
    torch.distributed.all_gather_object(items, item, group=control.process_group)
    return items


def collect(control: Group, item: Any) -> list[Any]:
    """Every rank's item on rank 0, nothing elsewhere; collective over the control group."""
    if control.size == 1:
        return [item]
    items: list[Any] = [None] * control.size if control.rank == 0 else []
    torch.distributed.gather_object(item, items or None, dst=0, group=control.process_group)
    return items


@contextmanager
def shared_outcome(control: Group, action: str) -> Iterator[None]:
    """Run a block on every rank; when it fails on one, raise the same error on all. Collective.

    The block itself must not communicate: a rank that fails leaves it early.

    Args:
        control: CPU group of all ranks.
        action: what is being done, for the message.

    Raises:
        CheckpointError: the first failing rank's message.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # Told to every rank and raised again below.
        failure = error
    messages = gather(control, None if failure is None else _describe(failure))
    failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
    if failed:
        rank, message = failed[0]
        place = f" on rank {rank}" if control.size > 1 else ""
        raise CheckpointError(f"{action} failed{place}: {message}") from failure


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError | OSError) else f"{type(error).__name__}: {error}"

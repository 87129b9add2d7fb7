"""Exchange Python objects between all ranks over the CPU group."""

from typing import Any

import torch.distributed

from neox_model.parallel.groups import Group

__all__ = ["all_gather_object", "gather_object"]


def all_gather_object(control: Group, item: Any) -> list[Any]:
    """Return every rank's item, ordered by rank. Collective over the control group."""
    if control.size == 1:
        return [item]
    items: list[Any] = [None] * control.size
    torch.distributed.all_gather_object(items, item, group=control.process_group)
    return items


def gather_object(control: Group, item: Any) -> list[Any]:
    """Return every rank's item on rank 0, an empty list on other ranks. Collective over the control group."""
    if control.size == 1:
        return [item]
    items: list[Any] = [None] * control.size if control.rank == 0 else []
    torch.distributed.gather_object(item, items or None, dst=0, group=control.process_group)
    return items

"""Count the collectives of a training step on real processes, by operation and process group."""

from neox_config import Resolved
from neox_model.metrics.collective_times import CollectiveTimes
from neox_model.parallel.groups import Groups
from neox_model.torch_compat import watched_collectives
from support.layouts import batches_of, start

__all__ = ["Counts", "counted_step"]

# "operation over group" -> [calls, bytes of the messages]
Counts = dict[str, list[int]]


def counted_step(resolved: Resolved) -> Counts:
    """Train two updates through the engine in the present world, and count the collectives of the second."""
    _, step, groups, _ = start(resolved)
    batches = batches_of(resolved, groups)
    step(batches)
    counter = _counter(groups)
    with watched_collectives(counter.watch):
        step(batches)
    return {
        f"{operation} over {group}": [total.count, total.bytes]
        for (operation, group), total in sorted(counter.totals.items())
        if total.size > 1
    }


def _counter(groups: Groups) -> CollectiveTimes:
    of_experts = {"experts": groups.experts, "copies of experts": groups.expert_copies}
    axes = {"pipe": groups.pipe, "model": groups.model, **of_experts, "data": groups.data}
    return CollectiveTimes(
        {name: group for name, group in axes.items() if group is not None and group.size > 1}
    )

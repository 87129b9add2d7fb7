"""Elastic training: the plan for the hosts that are left when others are lost.

The train batch stays what it was, and so do the samples of every iteration: only how many workers share them
changes. So a smaller job goes on from a checkpoint with the samples that would have come next.
"""

from collections.abc import Collection
from dataclasses import replace

from neox_launcher.config import Derived, resolve
from neox_launcher.errors import ConfigError, LaunchError
from neox_launcher.nodes import name_hosts
from neox_launcher.plan import LaunchPlan
from neox_launcher.resources.host import Host
from neox_launcher.resources.hosts import first_workers
from neox_launcher.resources.world import World

__all__ = ["can_shrink", "describe_change", "without_hosts"]

_MOST_LISTED = 8


def can_shrink(plan: LaunchPlan) -> bool:
    """Whether the configuration lets this job go on with fewer workers."""
    return plan.program == "train" and plan.resolved.config.elasticity.elasticity.enabled


def without_hosts(plan: LaunchPlan, lost: Collection[str]) -> LaunchPlan:
    """The same training on the hosts that are left: on as many of their slots as can share its batch.

    Args:
        plan: of a job that can shrink.
        lost: names of hosts.

    Raises:
        LaunchError: no number of workers that is left can share the batch.
    """
    left, derived, refusals = _left(plan, lost), plan.resolved.derived, []
    counts = [count for count in _sharing(derived) if count <= _slots(left)]
    for count in sorted(counts, reverse=True):
        hosts = first_workers(left, count)
        try:
            resolved = resolve(plan.resolved.config, devices=count, hosts=len(hosts))
        except ConfigError as error:
            refusals.append(f"{count:,} workers: {error}")
            continue
        # An address that was given is that of the first host.
        address = plan.master_addr if hosts[0].name == plan.world.hosts[0].name else None
        world = World(hosts=hosts, gpus=plan.world.gpus)
        return replace(plan, world=world, resolved=resolved, master_addr=address)
    sentence = (
        f"lost: {_names(plan, lost)}; the job cannot go on with {_counted(_slots(left))}, because its batch "
        f"of {derived.train_batch_size:,} samples suits {_listed(derived)} workers (elasticity); bring hosts "
        "back or add others, and start again: with `load` it goes on from the newest checkpoint there"
    )
    raise LaunchError("\n".join([sentence, *refusals]))


def describe_change(whole: LaunchPlan, before: LaunchPlan, after: LaunchPlan, lost: Collection[str]) -> str:
    """What a smaller plan changes, in sentences.

    Args:
        whole: the plan of all hosts that there were.
        before: the plan of the last attempt.
        after: what `without_hosts` made of the whole.
        lost: names of hosts, those lost before the last attempt included.
    """
    derived, slots = after.resolved.derived, _slots(_left(whole, lost))
    hosts = name_hosts([host.name for host in after.world.hosts])
    lines = [
        f"lost: {_names(before, lost)}; going on with {derived.world_size:,} workers (before: "
        f"{before.world.size:,}) on {hosts}",
        f"train batch {derived.train_batch_size:,} as before: micro-batch {derived.micro_batch_size}, "
        f"gradient accumulation steps {derived.accumulation}, "
        f"data-parallel size {derived.data_parallel_size}",
    ]
    if slots > derived.world_size:
        lines.append(
            f"{_counted(slots - derived.world_size)} of the {slots:,} left not used: the batch suits "
            f"{_listed(whole.resolved.derived)} workers (elasticity)"
        )
    return "\n".join(lines)


def _left(plan: LaunchPlan, lost: Collection[str]) -> list[Host]:
    return [host for host in plan.world.hosts if host.name not in lost]


def _names(plan: LaunchPlan, lost: Collection[str]) -> str:
    return name_hosts([host.name for host in plan.world.hosts if host.name in lost])


def _slots(hosts: Collection[Host]) -> int:
    return sum(len(host.slots) for host in hosts)


def _sharing(derived: Derived) -> tuple[int, ...]:
    """The numbers of workers that have this batch size.

    Version 0.2 gives some numbers of hosts a batch of their own, which no other number has.
    """
    shared = derived.elastic_devices
    return shared if derived.world_size in shared else (derived.world_size,)


def _listed(derived: Derived) -> str:
    """The largest of these numbers that are no more than there were."""
    counts = [count for count in _sharing(derived) if count <= derived.world_size]
    return ", ".join(f"{count:,}" for count in counts[-_MOST_LISTED:])


def _counted(slots: int) -> str:
    return f"{slots:,} slot{'' if slots == 1 else 's'}"

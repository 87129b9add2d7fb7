"""Elastic training: the plan for the hosts that are left when others are lost.

The train batch stays what it was, and so do the samples of every iteration: only how many workers share them
changes. So a smaller job goes on from a checkpoint with the samples that would have come next.
"""

from collections.abc import Collection
from contextlib import suppress
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
    left = _left(plan, lost)
    slots, derived = _slots(left), plan.resolved.derived
    for count in sorted(_sharing(derived), reverse=True):
        if count > slots:
            continue
        hosts = first_workers(left, count)
        # An address that was given is that of the first host. Not every number fits the rest of the layout.
        address = plan.master_addr if hosts[0].name == plan.world.hosts[0].name else None
        with suppress(ConfigError):
            resolved = resolve(plan.resolved.config, devices=count, hosts=len(hosts))
            return replace(
                plan, world=World(hosts=hosts, gpus=plan.world.gpus), resolved=resolved, master_addr=address
            )
    raise LaunchError(
        f"lost: {name_hosts(list(lost))}; the job cannot go on with {_counted(slots)}, because its batch "
        f"of {derived.train_batch_size:,} samples suits {_listed(derived)} workers (elasticity); bring hosts "
        "back or add others, and start again: with `load` it goes on from the newest checkpoint there"
    )


def describe_change(before: LaunchPlan, after: LaunchPlan, lost: Collection[str]) -> str:
    """What a smaller plan changes, in sentences.

    Args:
        before: the plan of the hosts that were there.
        after: what `without_hosts` made of it.
        lost: names of hosts.
    """
    derived, slots = after.resolved.derived, _slots(_left(before, lost))
    hosts = name_hosts([host.name for host in after.world.hosts])
    lines = [
        f"lost: {name_hosts(list(lost))}; going on with {derived.world_size:,} workers (before: "
        f"{before.world.size:,}) on {hosts}",
        f"train batch {derived.train_batch_size:,} as before: micro-batch {derived.micro_batch_size}, "
        f"gradient accumulation steps {derived.accumulation}, "
        f"data-parallel size {derived.data_parallel_size}",
    ]
    if slots > derived.world_size:
        lines.append(
            f"{_counted(slots - derived.world_size)} of the {slots:,} left not used: the batch suits "
            f"{_listed(before.resolved.derived)} workers (elasticity)"
        )
    return "\n".join(lines)


def _left(plan: LaunchPlan, lost: Collection[str]) -> list[Host]:
    return [host for host in plan.world.hosts if host.name not in lost]


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

"""Elastic training: builds the plan for the remaining hosts when others are lost.

The train batch size and the samples of every iteration stay the same; only the number of workers that share
them changes. A smaller job therefore resumes from a checkpoint with the next samples in order.
"""

from collections.abc import Collection
from dataclasses import replace

from neox_config import resolve
from neox_config.errors import ConfigError, LaunchError
from neox_config.pluralize import pluralize
from neox_config.spec.run import Layout
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.resources.host import Host, name_some
from neox_launcher.resources.hosts import first_workers
from neox_launcher.resources.world import World

__all__ = ["can_shrink", "describe_change", "without_hosts"]

_MOST_LISTED = 8


def can_shrink(plan: LaunchPlan) -> bool:
    """Return whether the configuration allows this job to continue with fewer workers."""
    return plan.program == "train" and plan.resolved.config.elasticity.elasticity.enabled


def without_hosts(plan: LaunchPlan, lost: Collection[str]) -> LaunchPlan:
    """Return the plan of the same run on the remaining hosts, with as many workers as its batch allows.

    Args:
        plan: plan of a job that can shrink.
        lost: names of the lost hosts.

    Raises:
        LaunchError: the batch cannot be shared by any number of workers up to the remaining slots.
    """
    left, run, refusals = _left(plan, lost), plan.resolved.run, []
    counts = [count for count in _sharing(run.layout) if count <= _slots(left)]
    for count in sorted(counts, reverse=True):
        hosts = first_workers(left, count)
        try:
            resolved = resolve(plan.resolved.config, devices=count, hosts=len(hosts))
        except ConfigError as error:
            refusals.append(f"{pluralize(count, 'worker')}: {error}")
            continue
        # A configured address is that of the first host.
        address = plan.master_addr if hosts[0].name == plan.world.hosts[0].name else None
        world = World(hosts=hosts, gpus=plan.world.gpus)
        return replace(plan, world=world, resolved=resolved, master_addr=address)
    sentence = (
        f"lost: {_names(plan, lost)}; the job cannot continue with {pluralize(_slots(left), 'slot')}, "
        f"because its batch of {run.batch.whole:,} samples requires {_listed(run.layout)} workers "
        "(elasticity); "
        "repair or replace hosts and start again; with `load`, it resumes from the latest checkpoint there"
    )
    raise LaunchError("\n".join([sentence, *refusals]), code="too-few-hosts")


def describe_change(whole: LaunchPlan, before: LaunchPlan, after: LaunchPlan, lost: Collection[str]) -> str:
    """Describe the changes of a smaller plan.

    Args:
        whole: plan with all hosts.
        before: plan of the last attempt.
        after: result of `without_hosts(whole, lost)`.
        lost: names of all lost hosts, including those lost before the last attempt.
    """
    layout, batch = after.resolved.run.layout, after.resolved.run.batch
    slots = _slots(_left(whole, lost))
    hosts = name_some([host.name for host in after.world.hosts])
    lines = [
        f"lost: {_names(before, lost)}; continuing with {pluralize(layout.world, 'worker')} (before: "
        f"{before.world.size:,}) on {hosts}",
        f"train batch {batch.whole:,} as before: micro-batch {batch.micro}, "
        f"gradient accumulation steps {batch.accumulation}, data-parallel size {layout.data}",
    ]
    if slots > layout.world:
        lines.append(
            f"{slots - layout.world:,} of the remaining {pluralize(slots, 'slot')} not used: the batch "
            f"requires {_listed(whole.resolved.run.layout)} workers (elasticity)"
        )
    return "\n".join(lines)


def _left(plan: LaunchPlan, lost: Collection[str]) -> list[Host]:
    return [host for host in plan.world.hosts if host.name not in lost]


def _names(plan: LaunchPlan, lost: Collection[str]) -> str:
    return name_some([host.name for host in plan.world.hosts if host.name in lost])


def _slots(hosts: Collection[Host]) -> int:
    return sum(len(host.slots) for host in hosts)


def _sharing(layout: Layout) -> tuple[int, ...]:
    """Return the numbers of workers with this batch size.

    Version 0.2 gives some numbers of hosts a batch size that no other number has.
    """
    shared = layout.elastic
    return shared if layout.world in shared else (layout.world,)


def _listed(layout: Layout) -> str:
    """Return the largest of these numbers, up to the number of workers in the plan, as text."""
    counts = [count for count in _sharing(layout) if count <= layout.world]
    return ", ".join(f"{count:,}" for count in counts[-_MOST_LISTED:])

"""A launch: refuse what cannot run, start the workers, and supervise them until they end."""

import sys

from neox_config.errors import LaunchError
from neox_config.problems import config_error
from neox_launcher.backends import BACKENDS
from neox_launcher.controller.display import Display
from neox_launcher.controller.restarts import run_with_restarts
from neox_launcher.controller.supervision import Outcome, supervise
from neox_launcher.controller.terminal import print_message
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.preflight import preflight
from neox_launcher.protocol.orders import Orders
from neox_launcher.resources.host import name_some
from neox_launcher.resources.names import check_names

__all__ = ["refuse_what_cannot_run", "run_plan", "supervise_plan"]


def refuse_what_cannot_run(plan: LaunchPlan) -> None:
    """Run the preflight checks, so that problems are found before workers are started.

    Raises:
        ConfigError: a preflight check fails.
        LaunchError: a program is missing or cannot start this plan, or a host name cannot be resolved.
    """
    problems = preflight(plan)
    if problems:
        raise config_error(problems, plan.resolved.config.files)
    backend = BACKENDS[plan.launcher]
    reason = backend.missing() or backend.refuses(plan)
    if reason is not None:
        raise LaunchError(reason)
    if not backend.uses_names:
        return
    names = [host.name for host in plan.world.hosts]
    checked = check_names(
        names,
        lambda count: print_message(f"neox-launch: resolved {count:,} of {len(names):,} host names\n"),
    )
    if checked.unknown:
        raise LaunchError(
            f"{plan.hosts_from}: {name_some(checked.unknown)} cannot be resolved here, neither by name nor "
            "by ssh's configuration; correct the names, /etc/hosts or ~/.ssh/config"
        )
    if checked.unchecked:
        print_message(
            "neox-launch: these host names were not resolved in time and are not checked before the start: "
            f"{name_some(checked.unchecked)}\n"
        )


def run_plan(plan: LaunchPlan, display: Display | None = None) -> Outcome:
    """Start the workers and supervise them until all have ended, with restarts if these are allowed.

    Args:
        plan: the plan.
        display: shows what the launch is doing; None shows nothing.

    Raises:
        LaunchError: a command cannot be started.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    shown = display or Display()

    def attempt(plan: LaunchPlan) -> Outcome:
        return supervise_plan(
            plan, plan.orders(), start_timeout=plan.resolved.config.launch.start_timeout, display=shown
        )

    return run_with_restarts(plan, attempt, display=shown)


def supervise_plan(
    plan: LaunchPlan, orders: Orders, *, start_timeout: float, display: Display | None = None
) -> Outcome:
    """Start the agents of a plan, or wait for those that a scheduler starts, and supervise them.

    Args:
        plan: hosts, and how their agents are started.
        orders: orders for the agents.
        start_timeout: seconds within which every host must report.
        display: shows what the launch is doing; None shows nothing.
    """
    backend, member = BACKENDS[plan.launcher], plan.member
    return supervise(
        lambda contact: backend.commands(plan, contact),
        orders,
        is_local=plan.is_local,
        start_timeout=start_timeout,
        endpoint=plan.endpoint,
        token=member.token if member else None,
        # The output of a run passes through the launcher, which may draw below it; prompts need the
        # terminal itself.
        shares_terminal=plan.is_local and plan.program != "train",
        display=display,
    )

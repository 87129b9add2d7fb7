"""Beginning again after a failure, from the newest checkpoint that the launch has saved."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from neox_launcher.config import Resolved
from neox_launcher.errors import LaunchError
from neox_launcher.fewer_hosts import can_shrink, describe_change, without_hosts
from neox_launcher.outcome import Failure, Outcome
from neox_launcher.plan import LaunchPlan
from neox_launcher.terminal import tell
from neox_launcher.worker import RESTART_VARIABLE

__all__ = ["run_with_restarts"]

_WRONG_REQUEST = 2


def run_with_restarts(plan: LaunchPlan, attempt: Callable[[LaunchPlan], Outcome]) -> Outcome:
    """Carry a plan out, and again after a failure, at most `plan.max_restarts` times more.

    A wrong request stays wrong, and a request to stop is obeyed: neither is tried again. An elastic job goes
    on without the hosts that it has lost; any other is started on the same hosts again.

    Args:
        plan: the first attempt's; the later ones go on from what was saved meanwhile, as resuming does.
        attempt: carries out one plan.
    """
    found_before, whole = _checkpoints(plan), plan
    lost: set[str] = set()
    for number in range(1, plan.max_restarts + 1):
        outcome = attempt(plan)
        if outcome.first_failure is None or outcome.was_stopped or outcome.exit_code == _WRONG_REQUEST:
            return outcome
        change = ""
        if _loses_hosts(plan, outcome, number):
            lost.update(outcome.lost_hosts)
            try:
                before, plan = plan, without_hosts(whole, lost)
            except LaunchError as error:
                return _ended_by(outcome, error)
            change = describe_change(whole, before, plan, lost) + "\n"
        if _checkpoints(plan) - found_before:
            plan = _resuming(plan)
        _tell_restart(plan, outcome, number, change)
        plan = replace(plan, environment={**plan.environment, RESTART_VARIABLE: str(number)})
    return attempt(plan)


def _loses_hosts(plan: LaunchPlan, outcome: Outcome, number: int) -> bool:
    """Whether the job goes on without some; one that did not come at the very start is tried once more."""
    return can_shrink(plan) and bool(outcome.lost_hosts) and (outcome.has_started or number > 1)


def _ended_by(outcome: Outcome, error: LaunchError) -> Outcome:
    """The same, with why there is no restart below what has failed."""
    first = outcome.first_failure
    assert first is not None, "what has not failed is not tried again"
    whole = Failure(
        rank=None, host="", time=first.time, message=f"{first}\n\n{error}", exit_code=first.exit_code
    )
    return replace(outcome, first_failure=whole)


def _resuming(plan: LaunchPlan) -> LaunchPlan:
    """The same, from the newest checkpoint in `save`, with everything that is in it."""
    config = plan.resolved.config
    checkpoint = config.checkpoint.replaced(
        load=config.checkpoint.save, finetune=False, no_load_optim=False, no_load_rng=False
    )
    config = config.model_copy(update={"checkpoint": checkpoint})
    return replace(plan, resolved=Resolved(config=config, derived=plan.resolved.derived))


def _checkpoints(plan: LaunchPlan) -> set[tuple[str, float]]:
    """Name and time of every complete checkpoint in `save`."""
    save = plan.resolved.config.checkpoint.save
    if save is None or plan.program != "train":
        return set()
    manifests = Path(plan.working_directory, save).glob("global_step*/manifest.json")
    found = set()
    for manifest in manifests:
        with suppress(FileNotFoundError):  # Only so many are kept.
            found.add((manifest.parent.name, manifest.stat().st_mtime))
    return found


def _tell_restart(plan: LaunchPlan, outcome: Outcome, number: int, change: str) -> None:
    load = plan.resolved.config.checkpoint.load
    source = f"the newest checkpoint in {load}" if load and plan.program == "train" else "the beginning"
    restart = f"restart {number} of at most {plan.max_restarts}, from {source}"
    tell(f"\n{outcome.first_failure}\n\n{restart}\n{change}")

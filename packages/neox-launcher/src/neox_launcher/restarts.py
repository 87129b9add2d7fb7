"""Beginning again after a failure, from the newest checkpoint that the launch has saved."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from neox_launcher.config import Resolved
from neox_launcher.outcome import Outcome
from neox_launcher.plan import LaunchPlan
from neox_launcher.terminal import tell

__all__ = ["run_with_restarts"]

_WRONG_REQUEST = 2


def run_with_restarts(plan: LaunchPlan, attempt: Callable[[LaunchPlan], Outcome]) -> Outcome:
    """Carry a plan out, and again after a failure, at most `plan.max_restarts` times more.

    A wrong request stays wrong, and a request to stop is obeyed: neither is tried again.

    Args:
        plan: the first attempt's; the later ones go on from what was saved meanwhile, as resuming does.
        attempt: carries out one plan.
    """
    found_before = _checkpoints(plan)
    for number in range(1, plan.max_restarts + 1):
        outcome = attempt(plan)
        if outcome.first_failure is None or outcome.was_stopped or outcome.exit_code == _WRONG_REQUEST:
            return outcome
        if _checkpoints(plan) - found_before:
            plan = _resuming(plan)
        _tell_restart(plan, outcome, number)
    return attempt(plan)


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


def _tell_restart(plan: LaunchPlan, outcome: Outcome, number: int) -> None:
    load = plan.resolved.config.checkpoint.load
    source = f"the newest checkpoint in {load}" if load and plan.program == "train" else "the beginning"
    tell(f"\n{outcome.first_failure}\n\nrestart {number} of at most {plan.max_restarts}, from {source}\n")

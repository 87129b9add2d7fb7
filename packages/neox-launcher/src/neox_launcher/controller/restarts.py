"""Restarts a launch after a failure, from the latest checkpoint that it has saved.

Each restart without a new checkpoint waits twice as long as the one before. An error that repeats in the same
iteration is not retried: it would repeat forever.
"""

import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from neox_config import Resolved
from neox_config.errors import LaunchError
from neox_config.facts.checkpoints import is_checkpoint, iteration_of
from neox_config.facts.spikes import REPEATED_SPIKES, ROLLBACK
from neox_launcher.controller.display import Display
from neox_launcher.controller.elastic import can_shrink, describe_change, without_hosts
from neox_launcher.controller.terminal import print_message
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.resuming import resumed_from, written_checkpoints
from neox_launcher.protocol.outcome import Failure, Outcome, judge
from neox_launcher.protocol.stop_signals import STOP_SIGNALS, name_of, signals_blocked
from neox_launcher.worker.reporting import LAUNCH_VARIABLE, RESTART_VARIABLE

__all__ = ["checkpoints_of", "run_with_restarts"]

# Invalid requests, and losses that would be spikes again.
_FINAL = (2, REPEATED_SPIKES)
_FIRST_WAIT_SECONDS = 2.0
_LONGEST_WAIT_SECONDS = 300.0
# Before the first iteration, the cause may be a file server or a network that recovers while restarts wait.
_ATTEMPTS_IN_ONE_ITERATION = 2
_ATTEMPTS_AT_THE_START = 3
# `timeout` signals its command and then the whole process group, of which the command is a member.
_REPEAT_SECONDS = 0.1
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


def run_with_restarts(
    plan: LaunchPlan, attempt: Callable[[LaunchPlan], Outcome], *, display: Display | None = None
) -> Outcome:
    """Run a plan, and restart it after a failure, at most `plan.max_restarts` times.

    Invalid requests, repeated loss spikes and requests to stop are not restarted. An elastic job is
    restarted without the hosts that it has lost, any other on the same hosts.

    Args:
        plan: plan of the first attempt; later ones resume from the checkpoints saved meanwhile.
        attempt: runs one plan.
        display: shows what the launch is doing; None shows nothing.
    """
    plan = replace(plan, environment={**plan.environment, LAUNCH_VARIABLE: uuid4().hex[:12]})
    found_before, whole = checkpoints_of(plan), plan
    found, lost, failed = found_before, set[str](), _Failures()
    for number in range(1, plan.max_restarts + 1):
        outcome = attempt(plan)
        if outcome.first_failure is None or outcome.was_stopped or outcome.exit_code in _FINAL:
            return outcome
        change, before = "", plan
        try:
            found, found_earlier = checkpoints_of(plan), found
            # A host that fails at the first start is tried once more.
            if can_shrink(plan) and outcome.lost_hosts and (outcome.has_started or number > 1):
                lost.update(outcome.lost_hosts)
                plan = without_hosts(whole, lost)
                change = describe_change(whole, before, plan, lost) + "\n"
        except LaunchError as error:
            return _ended_by(outcome, str(error))
        # A checkpoint of iteration 0 is no progress.
        has_saved = any(iteration_of(name) for name, _ in found - found_earlier)
        failed.add(outcome, has_saved=has_saved)
        if failed.is_permanent:
            return _ended_by(outcome, failed.describe())
        if found - found_before:
            # All states of the latest checkpoint in `save`.
            config = resumed_from(plan.resolved.config, plan.resolved.config.checkpoint.save)
            plan = replace(plan, resolved=Resolved.of(config, plan.resolved.sizes))
        _report_restart(plan, outcome, number, failed.wait_seconds, change)
        if display is not None:
            display.show_phase(f"waiting {failed.wait_seconds:g} s before restart {number}")
        received = _wait(failed.wait_seconds)
        if received is not None:
            print_message(f"\n{name_of(received)} received before the restart: ending\n")
            return judge([], [received])
        plan = replace(plan, environment={**plan.environment, RESTART_VARIABLE: str(number)})
    return attempt(plan)


class _Failures:
    """The failures of successive attempts: how long to wait, and whether to try again."""

    def __init__(self) -> None:
        self._last: tuple[int | None, str] | None = None
        self._equal = self._without_checkpoint = 0

    def add(self, outcome: Outcome, *, has_saved: bool) -> None:
        """Add the failure of an attempt.

        Args:
            outcome: outcome of the attempt.
            has_saved: the attempt saved a checkpoint after iteration 0.
        """
        failure = outcome.first_failure
        assert failure is not None, "only failures are added"
        self._without_checkpoint = 0 if has_saved else self._without_checkpoint + 1
        # A kill, a lost host or a hang is seldom caused by the program; a rollback does not repeat its batch.
        is_error = failure.rank is not None and not failure.unreported and failure.exit_code != ROLLBACK
        this = (outcome.iteration, _VARYING.sub("#", failure.message)) if is_error else None
        self._equal = self._equal + 1 if this is not None and this == self._last else 1
        self._last = this

    @property
    def wait_seconds(self) -> float:
        """Seconds until the next attempt; doubled for each attempt without a new checkpoint."""
        exponent = min(max(0, self._without_checkpoint - 1), 30)
        return float(min(_FIRST_WAIT_SECONDS * 2**exponent, _LONGEST_WAIT_SECONDS))

    @property
    def is_permanent(self) -> bool:
        """Whether the same error has occurred in the same iteration too often."""
        if self._last is None:
            return False
        return self._equal >= (
            _ATTEMPTS_AT_THE_START if self._last[0] is None else _ATTEMPTS_IN_ONE_ITERATION
        )

    def describe(self) -> str:
        """Return why there is no further restart."""
        assert self._last is not None, "a permanent failure has been added"
        iteration = self._last[0]
        place = "before the first iteration" if iteration is None else f"after iteration {iteration:,}"
        return (
            f"not restarted: the same error has occurred {self._equal} times in succession {place}; remove "
            "its cause, then start the job again"
        )


def _wait(seconds: float) -> int | None:
    """Wait, and return the stop signal that ended the wait; None if none arrived."""
    # An ignored SIGHUP, as under nohup, is no request to stop.
    numbers = {number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
    with signals_blocked(numbers):
        received = signal.sigtimedwait(numbers, seconds)
        while received is not None and signal.sigtimedwait(numbers, _REPEAT_SECONDS):
            pass  # The same request again, which would end this process.
    return None if received is None else received.si_signo


def _ended_by(outcome: Outcome, reason: str) -> Outcome:
    """Return the outcome with the reason for not restarting appended to its first failure."""
    first = outcome.first_failure
    assert first is not None, "only failures are restarted"
    whole = Failure(
        rank=None, host="", time=first.time, message=f"{first}\n\n{reason}", exit_code=first.exit_code
    )
    return replace(outcome, first_failure=whole)


def checkpoints_of(plan: LaunchPlan) -> set[tuple[str, float]]:
    """Return the name and the time of every complete checkpoint in `save` of a run.

    Raises:
        LaunchError: the folder cannot be read.
    """
    save = plan.resolved.config.checkpoint.save
    if save is None or plan.program != "train":
        return set()
    try:
        return written_checkpoints(Path(plan.working_directory, save))
    except OSError as error:
        raise LaunchError(
            f"save: {error.filename} cannot be read: {error.strerror}; make it readable"
        ) from error


def _report_restart(
    plan: LaunchPlan, outcome: Outcome, number: int, wait_seconds: float, change: str
) -> None:
    load = plan.resolved.config.checkpoint.load
    source = "the beginning"
    if load is not None and plan.program == "train":
        is_one = is_checkpoint(Path(plan.working_directory, load))
        source = load if is_one else f"the latest checkpoint in {load}"
    print_message(
        f"\n{outcome.first_failure}\n\n"
        f"restart {number} of at most {plan.max_restarts} in {wait_seconds:g} s, from {source}\n{change}"
    )

"""The outcome of a launch and its first failure."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from neox_launcher.protocol.exit_codes import SIGNALLED
from neox_launcher.protocol.stop_signals import STOP_SIGNALS

__all__ = ["HEAD_START_SECONDS", "Failure", "Outcome", "ended_by_stop", "judge"]

HEAD_START_SECONDS = 0.5
"""Subtracted from the time of a worker's death, which is detected later than the errors that it causes."""

_SAME_CLOCK_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Failure of a worker or of a host.

    Args:
        rank: rank of the worker; None for a failure of the host.
        host: host of the failure; empty for a failure of the whole launch.
        time: time of the failure in seconds since 1970.
        message: description of the error.
        traceback: traceback of the error; None if the message is sufficient for the user.
        exit_code: exit code of the worker.
        unreported: the worker ended without a report; not a failure after a request to stop.
        is_refused_start: another run is running in the folder, so that this one was refused; not a
            failure of the run.
        output: last lines of the worker's output if the terminal has not shown them.
    """

    rank: int | None
    host: str
    time: float
    message: str
    traceback: str | None = None
    exit_code: int = 1
    unreported: bool = False
    is_refused_start: bool = False
    output: str = ""

    def __str__(self) -> str:
        text = (self.traceback or self.message).rstrip()
        if self.output and self.unreported:
            text += f"\nlast output:\n{self.output}"
        if not self.host:
            return text
        who = f"host {self.host}: " if self.rank is None else f"worker {self.rank} on {self.host} failed:\n"
        return who + text

    def as_message(self) -> dict[str, Any]:
        """Return the fields for a message, and the age of the failure, because clocks may differ."""
        return {**asdict(self), "age": time.time() - self.time}

    @classmethod
    def from_message(cls, content: Mapping[str, Any]) -> Self:
        """Read the fields of `as_message`, with the time according to the local clock."""
        fields = dict(content)
        by_age = time.time() - fields.pop("age")
        failure = cls(**fields)
        # The clocks of most clusters agree better than a message is fast, and the order of failures counts.
        return failure if abs(failure.time - by_age) < _SAME_CLOCK_SECONDS else replace(failure, time=by_age)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a launch.

    Args:
        exit_code: exit code of the launcher.
        first_failure: the earliest failure; None if there was none.
        num_failures: number of failures.
        was_stopped: a signal requested the stop.
        has_started: all hosts connected, and workers were started.
        lost_hosts: names of the hosts that did not connect, were lost or do not answer.
        iteration: last iteration that any worker reported; None if none did.
        facts: for each rank the values that its worker reported with `report_facts`, its host, and the offset
            of that host's clock from the launcher's in seconds.
        other_versions: for each host that runs another version of this program, that version.
    """

    exit_code: int
    first_failure: Failure | None = None
    num_failures: int = 0
    was_stopped: bool = False
    has_started: bool = False
    lost_hosts: tuple[str, ...] = ()
    iteration: int | None = None
    facts: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    other_versions: Mapping[str, str] = field(default_factory=dict)


def ended_by_stop(failure: Failure) -> bool:
    """Return whether a worker ended by a signal that requests a stop, which is no failure after a request."""
    return failure.unreported and failure.exit_code in {SIGNALLED + number for number in STOP_SIGNALS}


def judge(failures: Iterable[Failure], signals: list[int], *, stops_regularly: bool = False) -> Outcome:
    """Return the outcome of a launch with these failures and requests to stop.

    Args:
        failures: of workers and hosts.
        signals: requests to stop.
        stops_regularly: a request to stop is how the program ends; it succeeds if no worker fails.
    """
    in_order = sorted(failures, key=lambda failure: failure.time)
    if signals and stops_regularly and not in_order:
        return Outcome(exit_code=0, was_stopped=True)
    if signals:
        # Workers that are still loading are ended by the signal; only reported errors are failures.
        in_order = [failure for failure in in_order if not failure.unreported]
    if in_order:
        first = in_order[0]
        return Outcome(
            exit_code=first.exit_code,
            first_failure=first,
            num_failures=len(in_order),
            was_stopped=bool(signals),
        )
    return Outcome(exit_code=SIGNALLED + signals[0] if signals else 0, was_stopped=bool(signals))

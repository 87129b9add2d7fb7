"""How a launch ended, and which failure the others followed from."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from signal import SIGTERM
from typing import Any, Self

from neox_launcher.processes import SIGNALLED

__all__ = ["HEAD_START_SECONDS", "Failure", "Outcome", "judge"]

HEAD_START_SECONDS = 0.5
"""A worker that vanished is noticed later than the complaints of those who talked to it."""

# torch's agent ends the other workers of its host by SIGTERM: who died of it did not fail first.
_ENDED_BY_AGENT = SIGNALLED + SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a worker failed, or a whole host.

    Args:
        rank: which worker; None when it is about the host.
        host: where it ran; empty when it is about the whole launch.
        time: when, in seconds since 1970.
        message: what was wrong.
        traceback: None where the message is meant for the user.
        exit_code: the worker's.
        unreported: it ended without a word; after a request to stop that is no failure.
        output: the last lines that it printed, where nobody has seen them.
    """

    rank: int | None
    host: str
    time: float
    message: str
    traceback: str | None = None
    exit_code: int = 1
    unreported: bool = False
    output: str = ""

    def __str__(self) -> str:
        text = (self.traceback or self.message).rstrip()
        if self.output and self.unreported:
            text += f"\nwhat it printed last:\n{self.output}"
        return f"{self._who}{text}"

    @property
    def _who(self) -> str:
        if not self.host:
            return ""
        return f"host {self.host}: " if self.rank is None else f"worker {self.rank} on {self.host} failed:\n"

    def as_message(self) -> dict[str, Any]:
        """For the launcher, whose clock may differ: the time becomes an age."""
        return {**asdict(self), "time": time.time() - self.time}

    @classmethod
    def from_message(cls, content: Mapping[str, Any]) -> Self:
        """What `as_message` wrote, on this side's clock."""
        failure = cls(**content)
        return replace(failure, time=time.time() - failure.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a launch ended.

    Args:
        exit_code: what the launcher returns.
        first_failure: the one that the others followed from; None when nothing failed.
        num_failures: workers that failed by themselves.
        was_stopped: a signal asked for the end.
        has_started: all hosts were there, and workers were started.
        lost_hosts: names of the hosts that did not come, are gone, or do not answer.
        facts: rank to what its worker has told with `report_facts`, its host, and that host's clock: seconds
            that it is ahead of the launcher's.
    """

    exit_code: int
    first_failure: Failure | None = None
    num_failures: int = 0
    was_stopped: bool = False
    has_started: bool = False
    lost_hosts: tuple[str, ...] = ()
    facts: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


def judge(failures: Iterable[Failure], signals: list[int]) -> Outcome:
    """What a launch with these failures and these requests to stop amounts to."""
    in_order = sorted(failures, key=lambda failure: failure.time)
    if signals:
        # Workers that had nothing to save yet died of the signal; only what they report is a failure.
        in_order = [failure for failure in in_order if not failure.unreported]
    by_themselves = [failure for failure in in_order if failure.exit_code != _ENDED_BY_AGENT] or in_order
    if by_themselves:
        first = by_themselves[0]
        return Outcome(
            exit_code=first.exit_code,
            first_failure=first,
            num_failures=len(by_themselves),
            was_stopped=bool(signals),
        )
    return Outcome(exit_code=SIGNALLED + signals[0] if signals else 0, was_stopped=bool(signals))

"""Detects that a job makes no progress, and writes a hang report."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from neox_config.atomic import atomic_write
from neox_launcher.controller.agents import AgentConnection
from neox_launcher.controller.hang_report import NO_AGENT_ANSWER, RankState, parse_collectives, render_report
from neox_launcher.protocol.background import ends_within
from neox_launcher.protocol.orders import Orders
from neox_launcher.worker.reporting import ALL_DONE

__all__ = ["HangWatch", "report_hang"]

_WRITE_SECONDS = 10.0


class HangWatch:
    """Detects that no rank reports progress any more.

    Ranks wait for each other in every iteration, so one that hangs soon stops all. While only some ranks
    are silent, they wait for one that is still working, for example one that is saving.

    Args:
        timeout: seconds without progress after the first iteration; None disables the detection.
        first_timeout: seconds from the start of the workers to the first iteration; None disables it.
    """

    def __init__(self, timeout: float | None, *, first_timeout: float | None = None) -> None:
        self._timeout, self._first_timeout = timeout, first_timeout
        self._started: float | None = None
        self._begun: float | None = None
        self.iteration: int | None = None
        """Last iteration that any rank has completed; None before the first."""
        self._reported: dict[int, tuple[int, float]] = {}

    @property
    def reason(self) -> str:
        """What has not happened in time, with the parameter that limits it."""
        if self._begun is None:
            return (
                f"no iteration was completed within {self._first_timeout:g} s after the start of the workers "
                "(first-iteration-timeout); increase it if the stacks show that the job was still loading or "
                "compiling"
            )
        return f"no progress for {self._timeout:g} s (hang-timeout)"

    def start(self) -> None:
        """Record that the workers are started."""
        self._started = time.monotonic()

    def hear(self, rank: int, iteration: int) -> None:
        """Record the iteration that a rank reports; with `ALL_DONE` it is not watched any more."""
        now = time.monotonic()
        self._begun = self._begun or now
        if iteration != ALL_DONE:
            self.iteration = max(iteration, self.iteration or 0)
        self._reported[rank] = (iteration, now)

    def forget(self, ranks: Sequence[int]) -> None:
        """Stop watching ranks that have ended."""
        for rank in ranks:
            self._reported[rank] = (ALL_DONE, time.monotonic())

    def has_stalled(self, ranks: int) -> bool:
        """Return whether a rank is not done, and none of the `ranks` has reported within the timeout.

        The end of a rank counts as a report, because others may have waited for it. For ranks that have not
        reported yet, the timeout starts with the first iteration of any rank.
        """
        now = time.monotonic()
        if self._begun is None:
            if self._first_timeout is None or self._started is None:
                return False
            return now - self._started > self._first_timeout
        if self._timeout is None:
            return False
        never = (0, self._begun)
        reported = [self._reported.get(rank, never) for rank in range(ranks)]
        is_watched = any(iteration != ALL_DONE for iteration, _ in reported)
        return is_watched and max(when for _, when in reported) < now - self._timeout

    def state_of(self, rank: int) -> tuple[int | None, float]:
        """Return the last iteration that a rank reported, and the seconds since then."""
        iteration, when = self._reported.get(rank, (None, self._begun or self._started or time.monotonic()))
        return iteration, time.monotonic() - when


def report_hang(orders: Orders, agents: Iterable[AgentConnection], watch: HangWatch) -> str:
    """Write the hang report from the dumps of the agents.

    Returns:
        The summary and the path of the report.
    """
    states = [_state_of(agent, rank, watch) for agent in agents for rank in agent.ranks]
    states.sort(key=lambda state: state.rank)
    report = render_report(states, reason=watch.reason)
    verdict = report.split("\n\n")[1]
    folder = Path(orders.working_directory)
    folders = [folder / orders.log_dir, folder] if orders.log_dir else [folder]
    return f"{watch.reason}\n{verdict}\n{_written(folders, report)}"


def _state_of(agent: AgentConnection, rank: int, watch: HangWatch) -> RankState:
    iteration, silent = watch.state_of(rank)
    answer = {"process": NO_AGENT_ANSWER} if agent.dump is None else agent.dump.get(str(rank), {})
    return RankState(
        rank=rank,
        host=agent.host,
        iteration=iteration,
        silent=silent,
        process=answer.get("process", ""),
        stacks=answer.get("stacks", ""),
        collectives=parse_collectives(answer.get("answer", "")),
    )


def _written(folders: Sequence[Path], report: str) -> str:
    """Write the report to the first folder that takes it; return where it is, or the report itself."""
    name = time.strftime("hang-%Y%m%d-%H%M%S.txt")
    reasons, written = ["no folder answered in time; a file server may be down"], list[Path]()

    def write() -> None:
        for path in (folder / name for folder in folders):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(path) as file:
                    file.write(report.encode(errors="replace").decode())
            except OSError as error:
                reasons.append(str(error))
            else:
                written.append(path)
                return

    # A file server that hangs may be the cause of the hang.
    ends_within(_WRITE_SECONDS, write, name="hang-report")
    if written:
        return f"full report: {written[0]}"
    return f"the report could not be written ({reasons[-1]}):\n{report}"

"""Noticing that a job does not get on, and finding out where its ranks are."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from neox_launcher.hang_report import RankState, parse_collectives, render_report
from neox_launcher.nodes import Node
from neox_launcher.orders import Orders
from neox_launcher.worker import ALL_DONE

__all__ = ["HangWatch", "report_hang"]


class HangWatch:
    """Notices that no rank tells any progress any more. The clock starts with the first iteration.

    Ranks wait for each other in every iteration, so one that is stuck soon stops all; while only some are
    silent, they wait for one that is at work, as all do for the last one to save.

    Args:
        timeout: seconds; None never notices anything.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._begun: float | None = None
        self._told: dict[int, tuple[int, float]] = {}

    def hear(self, rank: int, iteration: int) -> None:
        """A rank tells how far it is; `ALL_DONE` says that it need not be watched any more."""
        now = time.monotonic()
        self._begun = self._begun or now
        self._told[rank] = (iteration, now)

    def forget(self, ranks: Sequence[int]) -> None:
        """These have ended."""
        for rank in ranks:
            self._told[rank] = (ALL_DONE, time.monotonic())

    def has_stalled(self, ranks: int) -> bool:
        """Whether some of so many ranks are not done, and none has told anything for too long.

        That a rank is done is something told, too: others may have waited for it. One that has not told
        anything at all counts from the first iteration of any.
        """
        if self.timeout is None or self._begun is None:
            return False
        never = (0, self._begun)
        told = [self._told.get(rank, never) for rank in range(ranks)]
        is_watched = any(iteration != ALL_DONE for iteration, _ in told)
        return is_watched and max(when for _, when in told) < time.monotonic() - self.timeout

    def state_of(self, rank: int) -> tuple[int | None, float]:
        """A rank's last iteration, and the seconds since it told of it."""
        iteration, when = self._told.get(rank, (None, self._begun or time.monotonic()))
        return iteration, time.monotonic() - when


def report_hang(orders: Orders, nodes: Iterable[Node], watch: HangWatch) -> str:
    """Write the report of a hang, from what nodes have dumped.

    Returns:
        What it comes to, and where it is.
    """
    states = [_state_of(node, rank, watch) for node in nodes for rank in node.ranks]
    states.sort(key=lambda state: state.rank)
    reason = f"no progress for {orders.hang_timeout:g} s (hang-timeout)"
    report = render_report(states, reason=reason)
    verdict = report.split("\n\n")[1]
    folder = Path(orders.working_directory)
    folders = [folder / orders.log_dir, folder] if orders.log_dir else [folder]
    try:
        where = f"the whole report: {_write_to_one_of(folders, report)}"
    except OSError as error:
        where = f"the report could not be written ({error}):\n{report}"
    return f"{reason}\n{verdict}\n{where}"


def _state_of(node: Node, rank: int, watch: HangWatch) -> RankState:
    iteration, silent = watch.state_of(rank)
    answer = (node.dump or {}).get(str(rank), {})
    return RankState(
        rank=rank,
        host=node.host,
        iteration=iteration,
        silent=silent,
        stacks=answer.get("stacks", ""),
        collectives=parse_collectives(answer.get("answer", "")),
    )


def _write_to_one_of(folders: Sequence[Path], text: str) -> Path:
    name = time.strftime("hang-%Y%m%d-%H%M%S.txt")
    for folder in folders[:-1]:
        try:
            return _write(folder / name, text)
        except OSError:
            continue
    return _write(folders[-1] / name, text)


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="replace")
    return path

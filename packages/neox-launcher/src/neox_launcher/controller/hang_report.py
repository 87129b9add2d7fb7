"""Hang report: lagging ranks and the stacks of every rank.

A rank lags if its process is stopped, if it does not answer, if it has completed fewer iterations than
another rank, or if it has started fewer collectives of a process group than another member. Only sequence
numbers are compared, not states, because PyTorch's flight recorder leaves finished entries in the state
`scheduled` over gloo.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from neox_config.describe.tables import table
from neox_config.pluralize import pluralize
from neox_launcher.worker.reporting import ALL_DONE

__all__ = ["NO_AGENT_ANSWER", "RankState", "lagging_ranks", "parse_collectives", "render_report"]

_MOST_NAMED = 16
_THREAD = re.compile(r"^(Current t|T)hread 0x.*", re.MULTILINE)
NO_AGENT_ANSWER = "no answer of its agent"
"""Replaces the state of a process if its agent does not answer."""
_STOPPED = {
    "T": "is stopped (process state T, as after SIGSTOP); continue it with kill -CONT {pid}",
    "t": "is stopped by a debugger (process state t, process {pid})",
}
_SILENT = {
    NO_AGENT_ANSWER: "does not answer, nor does its agent; the host is overloaded or cannot be reached, or "
    "the agent is stopped",
    "D": "does not answer; process {pid} waits for a disk, a file server or a device (process state D)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """State of one rank during a hang.

    Args:
        rank: global rank.
        host: its host.
        iteration: last completed iteration; None if the rank has not reported any.
        silent: seconds since its last report.
        process: state of its process as in /proc, and its id: `T 1234`; empty if unknown.
        stacks: stacks of its Python threads; empty if its agent or the rank does not answer.
        collectives: process group -> (sequence number, name) of the last collective that it has started.
    """

    rank: int
    host: str
    iteration: int | None
    silent: float
    process: str = ""
    stacks: str = ""
    collectives: Mapping[str, tuple[int, str]] = field(default_factory=dict)


def parse_collectives(answer: str) -> dict[str, tuple[int, str]]:
    """Parse the collectives that a rank reports; return an empty dict if the answer cannot be parsed."""
    try:
        groups = json.loads(answer)
        return {str(name): (int(number), str(what)) for name, (number, what) in groups.items()}
    except (ValueError, AttributeError, TypeError):
        return {}


def lagging_ranks(states: Sequence[RankState]) -> dict[int, str]:
    """Return the ranks that the others probably wait for, with the reason: stopped, no answer, or behind."""
    stopped = {state.rank: why for state in states if (why := _in_words(state, _STOPPED, ""))}
    silent = {
        state.rank: _in_words(state, _SILENT, "does not answer") for state in states if not state.stacks
    }
    return stopped or silent or _behind_in_iterations(states) or _behind_in_collectives(states)


def _in_words(state: RankState, words: Mapping[str, str], other: str) -> str:
    """Return the words for the state of a rank's process, with its process id."""
    if state.process in words:
        return words[state.process]
    letter, _, pid = state.process.partition(" ")
    return words.get(letter, other).format(pid=pid)


def _behind_in_iterations(states: Sequence[RankState]) -> dict[int, str]:
    # A difference of one iteration is normal: ranks report at different moments of the same step.
    furthest = max((state.iteration or 0 for state in states), default=0)
    return {
        state.rank: f"has completed {pluralize(state.iteration or 0, 'iteration')}, others {furthest:,}"
        for state in states
        if (state.iteration or 0) < furthest - 1
    }


def _behind_in_collectives(states: Sequence[RankState]) -> dict[int, str]:
    furthest: dict[str, tuple[int, str]] = {}
    for state in states:
        for group, last in state.collectives.items():
            furthest[group] = max(last, furthest.get(group, last))
    behind = {}
    for state in states:
        for group, (number, _) in state.collectives.items():
            most, name = furthest[group]
            if number < most:
                behind[state.rank] = (
                    f"has started {number:,} collectives of group {group}, others {most:,}, the last {name}"
                )
                break
    return behind


def render_report(states: Sequence[RankState], *, reason: str) -> str:
    """Render the full report.

    Args:
        states: states of all ranks.
        reason: reason for the report, as a sentence.
    """
    lag = lagging_ranks(states)
    lines = [reason, "", *_verdict(states, lag), "", _table(states), ""]
    lines += ["Python stacks of all ranks, grouped by equal stacks:", ""]
    groups: dict[str, list[int]] = defaultdict(list)
    for state in states:
        # Without the addresses of threads, which differ between processes with equal stacks.
        groups[_THREAD.sub("Thread:", state.stacks)].append(state.rank)
    for stacks, ranks in groups.items():
        lines += [f"--- {_named(ranks)}", stacks.strip() or "(no answer)", ""]
    return "\n".join(lines)


def _verdict(states: Sequence[RankState], lag: Mapping[int, str]) -> list[str]:
    if not lag:
        return ["No rank is behind the others; all are waiting at the same point."]
    hosts = {state.rank: state.host for state in states}
    lines = [f"rank {rank} on {hosts[rank]} {why}" for rank, why in list(lag.items())[:_MOST_NAMED]]
    more = len(lag) - len(lines)
    return lines + ([f"and {pluralize(more, 'more rank')}, see below"] if more else [])


def _table(states: Sequence[RankState]) -> str:
    rows = [("rank", "host", "iteration", "silent for", "last collective of each group")]
    for state in states:
        begun = ", ".join(
            f"{group}: {number} {name}" for group, (number, name) in sorted(state.collectives.items())
        )
        iteration = {None: "none", ALL_DONE: "all done"}.get(state.iteration, str(state.iteration))
        rows.append((str(state.rank), state.host, iteration, f"{state.silent:.0f} s", begun or "-"))
    return table(rows, left=range(5))


def _named(ranks: Sequence[int]) -> str:
    """Return a list of ranks such as `rank 3` or `ranks 0-3, 6`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"

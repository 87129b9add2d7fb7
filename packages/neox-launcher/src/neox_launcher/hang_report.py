"""When nobody gets on: who lags, and what every rank was doing, in one text.

A rank lags when it has done fewer iterations than another, or begun fewer collectives of a group than
another member of it. Only sequence numbers are compared, not states: over gloo, PyTorch's flight recorder
leaves finished entries `scheduled`.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from neox_launcher.worker import ALL_DONE

__all__ = ["RankState", "lagging_ranks", "parse_collectives", "render_report"]

_MOST_NAMED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What is known of one rank while nobody gets on.

    Args:
        rank: which.
        host: where it runs.
        iteration: the last that it has done; None when it has told of none.
        silent: seconds since it told so.
        stacks: of its Python threads; empty when its node or the rank does not answer.
        collectives: process group -> (sequence number, name) of the last that it has begun.
    """

    rank: int
    host: str
    iteration: int | None
    silent: float
    stacks: str = ""
    collectives: Mapping[str, tuple[int, str]] = field(default_factory=dict)


def parse_collectives(answer: str) -> dict[str, tuple[int, str]]:
    """What a rank says of its collectives; empty when it says nothing that can be read."""
    try:
        groups = json.loads(answer)
        return {str(name): (int(number), str(what)) for name, (number, what) in groups.items()}
    except (ValueError, AttributeError, TypeError):
        return {}


def lagging_ranks(states: Sequence[RankState]) -> dict[int, str]:
    """The ranks that the others seem to wait for, with the reason: silent or behind."""
    silent = {
        state.rank: "does not answer"
        for state in states
        if not state.stacks and any(other.stacks for other in states)
    }
    return silent or _behind_in_iterations(states) or _behind_in_collectives(states)


def _behind_in_iterations(states: Sequence[RankState]) -> dict[int, str]:
    # One iteration apart is no sign: ranks tell of it at different moments of the same step.
    furthest = max((state.iteration or 0 for state in states), default=0)
    return {
        state.rank: f"has done {state.iteration or 0:,} iterations, others {furthest:,}"
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
                    f"has begun {number:,} collectives of group {group}, others {most:,}, the last {name}"
                )
                break
    return behind


def render_report(states: Sequence[RankState], *, reason: str) -> str:
    """The whole report.

    Args:
        states: of all ranks.
        reason: why it is written, a sentence.
    """
    lag = lagging_ranks(states)
    lines = [reason, "", *_verdict(states, lag), "", *_table(states), ""]
    lines += ["What the ranks were doing, those with the same Python stacks together:", ""]
    for stacks, ranks in _by_stacks(states).items():
        lines += [f"--- {_named(ranks)}", stacks.strip() or "(no answer)", ""]
    return "\n".join(lines)


def _verdict(states: Sequence[RankState], lag: Mapping[int, str]) -> list[str]:
    if not lag:
        return ["No rank is behind the others: all wait in the same place."]
    hosts = {state.rank: state.host for state in states}
    lines = [f"rank {rank} on {hosts[rank]} {why}" for rank, why in list(lag.items())[:_MOST_NAMED]]
    more = len(lag) - len(lines)
    return lines + ([f"and {more:,} more ranks, see below"] if more else [])


def _table(states: Sequence[RankState]) -> list[str]:
    rows = [("rank", "host", "iteration", "silent for", "last collective of each group")]
    for state in states:
        begun = ", ".join(
            f"{group}: {number} {name}" for group, (number, name) in sorted(state.collectives.items())
        )
        iteration = {None: "none", ALL_DONE: "all done"}.get(state.iteration, str(state.iteration))
        rows.append((str(state.rank), state.host, iteration, f"{state.silent:.0f} s", begun or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _by_stacks(states: Sequence[RankState]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for state in states:
        groups[_without_addresses(state.stacks)].append(state.rank)
    return groups


def _without_addresses(stacks: str) -> str:
    """Thread numbers differ between processes that do the same."""
    lines = stacks.splitlines()
    return "\n".join(
        "Thread:" if line.startswith(("Thread 0x", "Current thread 0x")) else line for line in lines
    )


def _named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3, 6`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"

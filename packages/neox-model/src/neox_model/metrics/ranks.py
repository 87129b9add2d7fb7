"""Compare what ranks report about themselves: which computes slowest, and which uses the most memory."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

__all__ = ["RankReport", "Slowest", "largest_memory", "slowest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank reports.

    Args:
        rank: the rank.
        host: name of its host.
        stage: its pipeline stage.
        members: the tensor-parallel ranks that share its layers' matrices; they wait for each other.
        seconds: mean time that it computed in an iteration; None if no iteration was measured.
        peak_bytes: the most memory that it has used.
    """

    rank: int
    host: str
    stage: int
    members: tuple[int, ...]
    seconds: float | None
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """The ranks that compute slowest, compared with others that do the same work.

    Args:
        ranks: one rank, or the tensor-parallel ranks that share a layer.
        hosts: their hosts, without repetition.
        seconds: their time.
        median: median time of all ranks with the same work.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    seconds: float
    median: float

    @property
    def factor(self) -> float:
        """Return how many times as long as the median they computed."""
        return self.seconds / self.median

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"rank{'s' if len(self.ranks) > 1 else ''} {ranks} ({', '.join(self.hosts)})"


def slowest(reports: Iterable[RankReport]) -> Slowest | None:
    """Return the slowest ranks compared with the median of their pipeline stage; None without comparison.

    Of two values the median is the smaller one, so that one of two ranks can be much slower than the median.
    """
    stages: defaultdict[int, defaultdict[tuple[int, ...], list[RankReport]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for report in reports:
        if report.seconds:
            stages[report.stage][report.members].append(report)
    found = [_slowest_of(list(replicas.values())) for replicas in stages.values() if len(replicas) > 1]
    return max(found, key=lambda each: each.factor, default=None)


def _slowest_of(replicas: Sequence[Sequence[RankReport]]) -> Slowest:
    times = [max(report.seconds or 0.0 for report in members) for members in replicas]
    members = replicas[times.index(max(times))]
    return Slowest(
        ranks=tuple(report.rank for report in members),
        hosts=tuple(dict.fromkeys(report.host for report in members)),
        seconds=max(times),
        median=median_low(times),
    )


def largest_memory(reports: Iterable[RankReport]) -> RankReport:
    """Return the report with the most memory; of equal ones that of the lowest rank."""
    return max(reports, key=lambda report: report.peak_bytes)

"""Compare the computing time and the memory of all ranks, and name a rank that makes the others wait."""

import logging
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Self

from neox_model.metrics.compute_time import HOST_CLOCK, ComputeTime, device_clock
from neox_model.metrics.memory import peak_bytes
from neox_model.parallel.control import gather_object
from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport

__all__ = ["RankReport", "StragglersCallback", "slowest"]

logger = logging.getLogger(__name__)


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
    found = []
    for replicas in stages.values():
        times = [max(report.seconds or 0.0 for report in members) for members in replicas.values()]
        members = list(replicas.values())[times.index(max(times))]
        if len(replicas) > 1:
            found.append(
                Slowest(
                    ranks=tuple(report.rank for report in members),
                    hosts=tuple(dict.fromkeys(report.host for report in members)),
                    seconds=max(times),
                    median=median_low(times),
                )
            )
    return max(found, key=lambda each: each.factor, default=None)


class StragglersCallback(Callback):
    """Gathers the reports of all ranks at the end of each interval; rank 0 compares them.

    A change of the slow ranks is logged and recorded, not every interval in which the same ranks are slow.
    The first iteration, which compiles and allocates, is not measured. It must precede the log, which resets
    peaks of memory.

    Args:
        time: how long this rank computes.
        peak: returns the most memory that this rank has used, in bytes.
        threshold: factor above the median from which a rank is slow.
        interval: iterations between two comparisons.
    """

    def __init__(
        self,
        *,
        time: ComputeTime,
        peak: Callable[[], float],
        threshold: float,
        interval: int,
    ) -> None:
        self._time = time
        self._peak, self._largest = peak, 0.0
        self._threshold = threshold
        self._interval = interval
        self._named: Slowest | None = None
        self._is_first = True

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if `straggler_threshold` is set.

        Under ZeRO, backward passes wait for the reductions inside them, so only forward passes are measured.
        """
        section, engine = run.config.logging, run.engine
        threshold = section.straggler_threshold
        if threshold is None:
            return None
        if run.groups.data.size == 1 and run.groups.world.rank == 0:
            logger.warning(
                "straggler-threshold names no slow rank: with one data-parallel rank, no two do the same work"
            )
        own = ("forward",) if engine.update.splits_over_data else ("forward", "backward_inner")
        time = ComputeTime(own, device_clock() if engine.device.type == "cuda" else HOST_CLOCK)
        engine.measure_phases(time.measure)
        return cls(
            time=time,
            peak=lambda: peak_bytes(engine.device),
            threshold=threshold,
            interval=section.log_interval,
        )

    def on_step(self, report: StepReport) -> None:
        """Compare the ranks at the end of each interval. Collective over all ranks."""
        if self._is_first:
            self._time.discard_iteration()
            self._is_first = False
        else:
            self._time.end_iteration()
        if self.run.state.iteration % self._interval == 0:
            # Since the start of the attempt: the log resets the device's peak on rank 0.
            self._largest = max(self._largest, self._peak())
            mine = RankReport(
                rank=self.run.groups.world.rank,
                host=socket.gethostname(),
                stage=self.run.groups.pipe.rank,
                members=self.run.groups.model.ranks,
                seconds=self._time.read(),
                peak_bytes=self._largest,
            )
            reports = gather_object(self.run.groups.control, mine)
            if reports:
                self._compare(reports)

    def _compare(self, reports: Sequence[RankReport]) -> None:
        # Of equal reports max returns that of the lowest rank.
        found, memory = slowest(reports), max(reports, key=lambda report: report.peak_bytes)
        metrics: dict[str, float] = {
            "ranks/largest_memory_bytes": memory.peak_bytes,
            "ranks/largest_memory_rank": memory.rank,
        }
        if found is not None:
            metrics["ranks/slowest_seconds"], metrics["ranks/median_seconds"] = found.seconds, found.median
            metrics["ranks/slowest_factor"], metrics["ranks/slowest_rank"] = found.factor, found.ranks[0]
        self.run.metrics.write(metrics, self.run.state.iteration)
        if found is not None:
            self._name_slowest(found)

    def _name_slowest(self, found: Slowest) -> None:
        """Log and record the slow ranks if they are others than in the last interval."""
        before, iteration = self._named, self.run.state.iteration
        self._named = found if found.factor >= self._threshold else None
        if self._named is None:
            if before is not None:
                logger.info("to iteration %d: %s is no longer slow", iteration, before)
            return
        if before is not None and before.ranks == found.ranks:
            return
        logger.warning(
            "to iteration %d: %s computed %.3g s per iteration, %.3g times as long as the median of the "
            "ranks with the same work; check that host with neox-launch doctor, or leave it out (exclude)",
            iteration,
            found,
            found.seconds,
            found.factor,
        )
        self.run.events.record(
            "straggler",
            iteration,
            ranks=list(found.ranks),
            hosts=list(found.hosts),
            seconds=found.seconds,
            median=found.median,
            factor=found.factor,
        )

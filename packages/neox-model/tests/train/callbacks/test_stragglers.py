import logging

from neox_model.train.callbacks import stragglers
from neox_model.train.callbacks.stragglers import RankReport, StragglersCallback
from support.refusals import shows
from support.runs import Record, count


class Time:
    """Counts the iterations that were measured and left out."""

    def __init__(self):
        self.ended = self.discarded = 0

    def end_iteration(self):
        self.ended += 1

    def discard_iteration(self):
        self.discarded += 1

    def read(self):
        return 1.0


def compared(monkeypatch, times, *, memory=(10.0,), interval=1):
    """Train with two ranks whose times and memory in each interval are given; return record and time."""
    record, measured, intervals = Record(), Time(), iter(range(len(times)))

    def of_two_ranks(control, mine):
        place = next(intervals)
        peak = memory[min(place, len(memory) - 1)]
        values = ((0, times[place][0], 1.0), (1, times[place][1], peak))
        return [
            RankReport(
                rank=rank, host=f"host-{rank}", stage=0, members=(rank,), seconds=time, peak_bytes=most
            )
            for rank, time, most in values
        ]

    monkeypatch.setattr(stragglers, "gather_object", of_two_ranks)
    callback = StragglersCallback(
        time=measured,
        peak=lambda: 0.0,
        threshold=1.5,
        interval=interval,
    )
    count(callback, last=interval * len(times), writers=[record])
    return record, measured


def test_a_rank_is_named_when_it_becomes_slow_and_not_again(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    times = [(1.0, 1.4), (1.0, 1.5), (1.0, 3.0), (1.0, 1.0), (2.0, 1.0)]
    record, _ = compared(monkeypatch, times)
    named = [event for event in record.events if event[0] == "straggler"]
    assert named == [
        ("straggler", 2, {"ranks": [1], "hosts": ["host-1"], "seconds": 1.5, "median": 1.0, "factor": 1.5}),
        ("straggler", 5, {"ranks": [0], "hosts": ["host-0"], "seconds": 2.0, "median": 1.0, "factor": 2.0}),
    ]
    [first, second] = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert first.startswith("to iteration 2: rank 1 (host-1) computed 1.5 s per iteration, 1.5 times as long")
    assert second.startswith("to iteration 5: rank 0 (host-0) ")
    assert shows(caplog.text, "iteration 4", "rank 1", "host-1")
    assert [metrics["ranks/slowest_factor"] for _, metrics in record.metrics] == [1.4, 1.5, 3.0, 1.0, 2.0]
    assert record.metrics[2] == (
        3,
        {
            "ranks/largest_memory_bytes": 10.0,
            "ranks/largest_memory_rank": 1,
            "ranks/slowest_seconds": 3.0,
            "ranks/median_seconds": 1.0,
            "ranks/slowest_factor": 3.0,
            "ranks/slowest_rank": 1,
        },
    )


def test_ranks_are_compared_once_per_interval_without_the_first_iteration(monkeypatch):
    record, measured = compared(monkeypatch, [(1.0, 1.0)] * 2, interval=3)
    assert [iteration for iteration, _ in record.metrics] == [3, 6]
    assert (measured.discarded, measured.ended) == (1, 5)

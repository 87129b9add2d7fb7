import numpy as np

from neox_data.indexed import lengths
from neox_data.indexed.lengths import histogram_lines, length_counts


def test_lengths_are_counted_by_powers_of_two(monkeypatch) -> None:
    sizes = np.array([0, 0, 1, 2, 3, 4, 7, 8, 2**31 - 1], np.int32)
    expected = [2, 1, 2, 2, 1, *[0] * 26, 1, 0]
    assert length_counts(sizes).tolist() == expected
    monkeypatch.setattr(lengths, "_CHUNK", 2)
    assert length_counts(sizes).tolist() == expected


def test_the_chart_runs_from_the_shortest_to_the_longest() -> None:
    lines = [line.split() for line in histogram_lines(np.array([2] * 80 + [3] + [9], np.int32))]
    assert lines == [["2", "to", "3", "81", "#" * 40], ["4", "to", "7", "0"], ["8", "to", "15", "1", "#"]]
    assert list(histogram_lines(np.array([], np.int32))) == []

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neox_data.errors import DataError
from neox_data.splits import split_documents
from support.refusals import refused


def bounds(split: str, num_documents: int) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in split_documents(split, num_documents).values()]


@pytest.mark.parametrize(
    ("split", "num_documents", "expected"),
    [
        ("969, 30, 1", 1000, [(0, 969), (969, 999), (999, 1000)]),
        ("969/30/1", 1000, [(0, 969), (969, 999), (999, 1000)]),
        ("1", 7, [(0, 7), (7, 7), (7, 7)]),
        ("8,2", 10, [(0, 8), (8, 10), (10, 10)]),
        ("1,1,2,96", 8, [(0, 2), (2, 4), (4, 8)]),
        # round(2.5) = 2 for each half: 4 of 5, so all but the first boundary rise by one.
        ("50,50", 5, [(0, 3), (3, 5), (5, 5)]),
        # round(3.5) = 4 for each half: 8 of 7, so they fall by one.
        ("50,50", 7, [(0, 3), (3, 7), (7, 7)]),
        # 0, 2, 4 of 3: the first boundary would fall to -1.
        ("0,50,50", 3, [(0, 0), (0, 1), (1, 3)]),
        ("969, 30, 1", 0, [(0, 0), (0, 0), (0, 0)]),
    ],
)
def test_boundaries(split: str, num_documents: int, expected: list[tuple[int, int]]) -> None:
    assert bounds(split, num_documents) == expected


def test_parts_have_their_names() -> None:
    assert list(split_documents("1,1,1", 3)) == ["train", "valid", "test"]


@given(
    st.lists(st.floats(0, 1000), min_size=1, max_size=3).filter(lambda s: sum(s) > 0.001),
    st.integers(0, 10**6),
)
def test_the_parts_are_all_documents_once(shares: list[float], num_documents: int) -> None:
    parts = bounds(",".join(map(str, shares)), num_documents)
    assert parts[0][0] == 0
    assert parts[-1][1] == num_documents
    assert all(start <= stop for start, stop in parts)
    assert parts[0][1] == parts[1][0]
    assert parts[1][1] == parts[2][0]


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "-1,2", "nan", "inf,1", "1e308,1e308,1", "969;30;1"])
def test_invalid_splits_are_refused(split: str) -> None:
    with refused(DataError, '"969, 30, 1"'):
        split_documents(split, 10)

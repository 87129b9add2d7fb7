"""The message about copies that differ names tensors, ranks and hosts."""

from neox_model.train.callbacks.replica_check import _Copy, _describe
from support.refusals import shows


def report(host: str, *values: tuple[str, tuple[int, ...], int]) -> tuple[str, list[_Copy]]:
    return host, [_Copy(*value) for value in values]


def test_the_rank_that_differs_from_the_majority_is_named():
    members = (0, 1, 2)
    reports = [report(f"host-{rank}", ("a/exp_avg", members, 7 if rank == 1 else 5)) for rank in members]
    text = _describe(reports, 1200)
    assert text.startswith(
        "after iteration 1,200 the copy of a/exp_avg on rank 1 (host-1) differs from 2 others: "
    )


def test_of_two_copies_both_ranks_are_named():
    reports = [report("a", ("w", (0, 2), 1)), report("a"), report("b", ("w", (0, 2), 2)), report("b")]
    assert shows(_describe(reports, 1), "w", "rank 0 (a)", "rank 2 (b)")


def test_many_tensors_are_counted():
    reports = [
        report(host, *((f"t{n}", (0, 1), value + n) for n in range(8)))
        for host, value in (("a", 0), ("b", 9))
    ]
    text = _describe(reports, 1)
    assert "t4 on" in text
    assert "t5 on" not in text
    assert shows(text, "; 3 more")

"""A number that is sent in one iteration and read in a later one."""

from neox_model.parallel.delayed_exchange import DelayedExchange
from neox_model.parallel.groups import SINGLE_RANK
from support.distributed import run_ranks


def exchange() -> list[int | None]:
    from torch import distributed

    from neox_model.parallel.topology import create_groups

    control = create_groups(1, 1).control
    rank = distributed.get_rank()
    smallest, largest = DelayedExchange(control, "min"), DelayedExchange(control, "max")
    found = [smallest.receive()]
    smallest.send(rank + 3)
    largest.send(rank + 3)
    return [*found, largest.receive(), smallest.receive(), smallest.receive()]


def test_all_ranks_read_the_same_result_once():
    assert run_ranks(exchange, size=2) == [[None, 4, 3, None]] * 2


def test_one_rank_reads_what_it_sent():
    alone = DelayedExchange(SINGLE_RANK, "min")
    alone.send(7)
    assert [alone.receive(), alone.receive()] == [7, None]

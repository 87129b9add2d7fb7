"""The compressed average of real ranks is that of a plain reading in float64, with one bit per element."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from neox_model.extras.one_bit import compressed_average
from neox_model.extras.one_bit.compressed_average import CompressedAverage, Compressible
from neox_model.parallel.groups import SINGLE_RANK, Group, part_length
from support.distributed import run_ranks
from support.one_bit import PlainAverage

SHAPES = ((5, 7), (3,), (41,), (16, 9))
STEPS = 4


def values_of(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def live_elements() -> list[Tensor]:
    masks = [torch.ones(shape, dtype=torch.bool) for shape in SHAPES]
    masks[0][2] = False
    masks[1][:] = False
    return masks


def world() -> Group:
    size = torch.distributed.get_world_size()
    return Group(torch.distributed.get_rank(), size, torch.distributed.group.WORLD, tuple(range(size)))


def new_errors(size: int) -> list[tuple[Tensor, Tensor]]:
    shapes = [torch.Size(shape) for shape in SHAPES]
    return [(torch.zeros(shape), torch.zeros(part_length(shape.numel(), size))) for shape in shapes]


def averaged(group: Group, order: list[int]) -> tuple[list, CompressedAverage]:
    """Return the last averages of this rank and its errors, by tensor, sent in this order."""
    average, errors, masks = CompressedAverage(group), new_errors(group.size), live_elements()
    for step in range(STEPS):
        mine = [value * mask for value, mask in zip(values_of(group.rank, step), masks, strict=True)]
        average([Compressible(values=mine[i], is_live=masks[i], worker_error=errors[i][0],
                              server_error=errors[i][1]) for i in order])  # fmt: skip
    parts = [[mine[i].tolist(), errors[i][0].tolist(), errors[i][1].tolist()] for i in range(len(SHAPES))]
    return parts, average


def average_here() -> dict:
    """Return this rank's results in three orders and bucket sizes, and the bytes that torch was given."""
    group, messages = world(), []
    names = ("all_to_all_single", "all_gather_single")
    calls = {name: getattr(compressed_average, name) for name in names}

    def counting(name):
        def call(received, sent, **others):
            # Of an exchange, one row stays here; a gathered row goes to each of the others.
            rows = len(sent) - 1 if name == "all_to_all_single" else group.size - 1
            messages.append(sent.element_size() * sent.shape[1] * rows)
            return calls[name](received, sent, **others)

        return call

    with patch.multiple(compressed_average, **{name: counting(name) for name in names}):
        results, average = averaged(group, [0, 1, 2, 3])
    other, _ = averaged(group, [3, 1, 0, 2])
    with patch.object(compressed_average, "_BUCKET_ELEMENTS", 50):
        alone, _ = averaged(group, [0, 1, 2, 3])
    return {
        "results": results,
        "same": results == other == alone,
        "sent": average.sent_bytes,
        "counted": sum(messages),
    }


def check(size: int) -> None:
    found = run_ranks(average_here, size=size)
    masks = live_elements()
    for index, shape in enumerate(SHAPES):
        mask, length = masks[index].reshape(-1), torch.Size(shape).numel()
        part = part_length(length, size)
        plain = PlainAverage(length, replicas=size, part=part)
        for step in range(STEPS):
            vectors = [values_of(rank, step)[index].double().reshape(-1) * mask for rank in range(size)]
            expected = plain(vectors, mask)
        for rank, result in enumerate(each["results"][index] for each in found):
            value, worker, server = (torch.tensor(part).double().reshape(-1) for part in result)
            assert torch.allclose(value, expected, atol=1e-5)
            assert torch.allclose(worker, plain.worker_errors[rank], atol=1e-5)
            served = plain.server_error[rank * part : (rank + 1) * part]
            assert torch.allclose(server[: len(served)], served, atol=1e-5)
            assert not server[len(served) :].any()
    assert all(each["results"][0][0] == found[0]["results"][0][0] for each in found)
    assert all(each["same"] for each in found)
    assert {each["sent"] for each in found} == {each["counted"] for each in found}
    bits = sum(part_length(torch.Size(shape).numel(), size) for shape in SHAPES) // 8
    assert found[0]["sent"] == STEPS * 2 * (size - 1) * (bits + 4 * len(SHAPES))


def test_two_ranks_average_as_a_plain_reading_does():
    check(2)


def test_three_ranks_average_as_a_plain_reading_does():
    check(3)


def test_a_rank_alone_compresses_nothing():
    mine, errors = values_of(0, 0)[0], new_errors(1)[0]
    average = CompressedAverage(SINGLE_RANK)
    average([Compressible(values=mine, is_live=mine == mine, worker_error=errors[0], server_error=errors[1])])
    assert torch.equal(mine, values_of(0, 0)[0])
    assert average.sent_bytes == 0


@dataclass(frozen=True)
class Threads:
    """Ranks that are threads of one process: what each has sent, and where they wait for each other."""

    size: int
    sent: dict[int, Tensor] = field(default_factory=dict)
    barrier: Barrier = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "barrier", Barrier(self.size, timeout=60))

    def group(self, rank: int) -> Group:
        process_group = SimpleNamespace(rank=rank, threads=self)
        return Group(rank, self.size, process_group, tuple(range(self.size)))  # type: ignore[arg-type]

    def share(self, sent: Tensor, rank: int) -> list[Tensor]:
        self.sent[rank] = sent
        self.barrier.wait()
        everything = [self.sent[other] for other in range(self.size)]
        self.barrier.wait()
        return everything


def exchange(received: Tensor, sent: Tensor, group: SimpleNamespace) -> None:
    received.copy_(torch.stack([each[group.rank] for each in group.threads.share(sent, group.rank)]))


def gather(received: Tensor, sent: Tensor, group: SimpleNamespace) -> None:
    received.copy_(torch.cat(group.threads.share(sent, group.rank)))


@pytest.mark.parametrize("size", [5, 8])
def test_averages_of_many_ranks_do_not_depend_on_the_order_of_tensors(size):
    found = []
    calls = {"all_to_all_single": exchange, "all_gather_single": gather}
    with patch.multiple(compressed_average, **calls), ThreadPoolExecutor(size) as ranks:
        for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 3, 1]):
            threads = Threads(size)
            run = [ranks.submit(averaged, threads.group(rank), order) for rank in range(size)]
            found.append([each.result()[0] for each in run])
    assert found[0] == found[1] == found[2]

"""Micro-batches without a target are reported once, whichever rank had them."""

import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist

from neox_model.train.callbacks.steps import EmptyMicroBatches
from neox_model.train.data.batch import Batch
from neox_model.train.state import StepReport, TrainState
from support.distributed import run_ranks
from support.runs import a_run, train


class Step:
    """Takes two micro-batches, as an engine does, and no more."""

    def __call__(self, batches: Iterator[Batch]) -> StepReport:
        next(batches), next(batches)
        return StepReport(loss=torch.zeros(()), grad_norm=None, skipped=False, tokens=0)


def batch_with(targets: int) -> Batch:
    mask = torch.tensor([[1.0] * targets + [0.0] * (3 - targets)])
    return Batch(torch.zeros(1, 3).long(), torch.zeros(1, 3).long(), mask)


def trained(targets: list[list[int]], interval: int, stages: int) -> tuple[int, list[str]]:
    """Return how many micro-batches the step left over, and what was logged; `targets` is by replica."""
    from neox_model.parallel.topology import create_groups

    groups = create_groups(1, stages)
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("neox_model.train.callbacks.steps").addHandler(handler)
    mine = targets[groups.data.rank]
    stream = iter([batch_with(count) for count in mine])
    # Longer, so that its end is no reason to report.
    state = TrainState(last_iteration=1000, samples_per_iteration=1)
    run = a_run(EmptyMicroBatches(groups, interval=interval), state=state, groups=groups, step=Step())
    train(run, stream, len(mine) // 2)
    dist.barrier()
    return len(list(stream)), heard


def texts_of(results: list[tuple[int, list[str]]]) -> list[list[str]]:
    assert all(left == 0 for left, _ in results)
    return [heard for _, heard in results]


def test_one_rank_reports_the_micro_batches_of_all():
    targets = [[3, 1, 2, 2, 0, 0], [1, 1, 0, 3, 0, 0]]
    first, second = texts_of(run_ranks(trained, size=2, targets=targets, interval=1, stages=0))
    (text,) = first
    assert second == []
    assert text.startswith("1 of 8 micro-batches had no token that counts in the loss")
    assert "loss-normalization: global" in text


def test_those_between_two_reports_are_counted():
    first, _ = texts_of(
        run_ranks(trained, size=2, targets=[[3, 0, 0, 2], [0, 1, 1, 1]], interval=2, stages=0)
    )
    assert [text[:22] for text in first] == ["3 of 8 micro-batches h"]


def test_the_stages_of_a_replica_count_once():
    first, second = texts_of(run_ranks(trained, size=2, targets=[[3, 0]], interval=1, stages=2))
    assert [text[:22] for text in first] == ["1 of 2 micro-batches h"]
    assert second == []


def test_nothing_is_reported_if_every_micro_batch_has_a_target():
    results = run_ranks(trained, size=2, targets=[[3, 1], [1, 1]], interval=1, stages=0)
    assert texts_of(results) == [[], []]

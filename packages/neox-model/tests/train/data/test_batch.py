import pytest
import torch
import torch.distributed as dist

from neox_model.parallel.groups import SINGLE_RANK
from neox_model.parallel.topology import create_groups
from neox_model.train.data.batch import (
    Batch,
    DocumentEnds,
    as_batch,
    unweighted,
    weighted_by_micro_batch,
    weighted_globally,
)
from support.distributed import run_ranks

CPU = torch.device("cpu")
# 0 ends a document.
WINDOW = torch.tensor([[5, 0, 7, 8, 0, 0, 3]])


def test_labels_are_the_next_tokens_and_all_count():
    batch = as_batch(torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]]))
    assert batch.tokens_BS.tolist() == [[5, 6, 7], [1, 2, 3]]
    assert batch.labels_BS.tolist() == [[6, 7, 8], [2, 3, 4]]
    assert batch.loss_mask_BS.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert batch.inputs is batch.tokens_BS


def test_predictions_from_a_documents_end_can_be_left_out():
    batch = as_batch(WINDOW, ends=DocumentEnds(token=0, masks_loss=True))
    assert batch.loss_mask_BS.tolist() == [[1, 0, 1, 1, 0, 0]]
    assert batch.inputs is batch.tokens_BS


def test_positions_can_be_reset_after_each_document():
    batch = as_batch(WINDOW, ends=DocumentEnds(token=0, restarts_positions=True))
    tokens, positions = batch.inputs
    assert tokens is batch.tokens_BS
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert batch.loss_mask_BS.tolist() == [[1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("restarts", "expected"), [(False, [[0, 1, 2, 3, 4, 5]]), (True, [[0, 1, 0, 1, 2, 0]])]
)
def test_document_ids_differ_between_documents(restarts, expected):
    ends = DocumentEnds(token=0, hides_others=True, restarts_positions=restarts)
    tokens, documents, positions = as_batch(WINDOW, ends=ends).inputs
    assert tokens.tolist() == [[5, 0, 7, 8, 0, 0]]
    assert documents.tolist() == [[0, 0, 1, 1, 1, 2]]
    assert positions.tolist() == expected


def masked_batches() -> list[Batch]:
    masks = [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    return [Batch(torch.tensor([[1]]), torch.tensor([[1]]), torch.tensor([mask]).float()) for mask in masks]


def test_micro_batches_are_unchanged():
    stream = iter(masked_batches())
    assert [batch.loss_mask_BS.sum().item() for batch in unweighted(stream, 3, CPU)] == [4, 1, 2]
    assert len(list(stream)) == 1


def test_weights_of_a_micro_batch_divide_by_its_unmasked_tokens():
    weighted = list(weighted_by_micro_batch(iter(masked_batches()), 4, CPU))
    assert [batch.loss_mask_BS[0].tolist() for batch in weighted] == [
        [0.25] * 4,
        [1, 0, 0, 0],
        [0.5, 0.5, 0, 0],
        [0] * 4,
    ]


def test_global_weights_divide_by_all_unmasked_tokens():
    stream = iter(masked_batches())
    weighted = list(weighted_globally(stream, 2, CPU, data=SINGLE_RANK))
    # The mean over two micro-batches of these sums is one fifth for each of five tokens.
    assert weighted[0].loss_mask_BS.tolist() == [[pytest.approx(0.4)] * 4]
    assert weighted[1].loss_mask_BS.tolist() == [[pytest.approx(0.4), 0, 0, 0]]
    assert len(list(stream)) == 2


def test_fully_masked_update_and_empty_stream_are_accepted():
    (batch,) = weighted_globally(iter(masked_batches()[3:]), 1, CPU, data=SINGLE_RANK)
    assert batch.loss_mask_BS.tolist() == [[0, 0, 0, 0]]
    assert list(weighted_globally(iter([]), 4, CPU, data=SINGLE_RANK)) == []


def weigh_on_two_ranks() -> list[list[float]]:
    groups = create_groups(1, 0)
    mine = masked_batches()[2 * dist.get_rank() :]
    return [
        batch.loss_mask_BS[0].tolist() for batch in weighted_globally(iter(mine), 2, CPU, data=groups.data)
    ]


def test_global_weights_count_the_other_replicas_tokens():
    share = pytest.approx(4 / 7)
    first, second = run_ranks(weigh_on_two_ranks, size=2)
    assert first == [[share] * 4, [share, 0, 0, 0]]
    assert second == [[share, share, 0, 0], [0, 0, 0, 0]]


def test_labels_below_zero_do_not_count():
    labels = torch.tensor([[5, -100, 7, -1, 9, -100, 3]])
    batch = as_batch(WINDOW, labels=labels)
    assert batch.tokens_BS.tolist() == [[5, 0, 7, 8, 0, 0]]
    assert batch.labels_BS.tolist() == [[0, 7, 0, 9, 0, 3]]
    assert batch.loss_mask_BS.tolist() == [[0, 1, 0, 1, 0, 1]]
    assert labels.tolist() == [[5, -100, 7, -1, 9, -100, 3]]


def test_labels_and_ends_of_documents_are_masked_together():
    labels = torch.tensor([[5, -100, 7, 8, 9, 0, 3]])
    batch = as_batch(WINDOW, ends=DocumentEnds(token=0, masks_loss=True), labels=labels)
    # The inputs are 5 0 7 8 0 0: predictions from 0 do not count, and neither does the first label.
    assert batch.loss_mask_BS.tolist() == [[0, 0, 1, 1, 0, 0]]


def test_one_window_with_labels_leaves_the_dataset_unchanged():
    labels = torch.tensor([[1, -100, 2]])
    as_batch(torch.tensor([[1, 5, 2]]), labels=labels)
    assert labels.tolist() == [[1, -100, 2]]
